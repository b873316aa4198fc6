#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tessera {

/// Formats of optimizer states (SavedState::format), from one to another: for a checkpoint of a run with another
/// /optimizer/state_dtype. Between "fp32" and "bf16".
bool can_convert(const std::string& from, const std::string& to);
/// Whether each number is kept.
bool is_exact(const std::string& from, const std::string& to);

/// `from` and `to` hold as many numbers. To bf16 rounds to nearest. REQUIRES: can_convert.
void convert_state(const std::string& from_format, std::span<const std::byte> from, const std::string& to_format,
                   std::span<std::byte> to);

}  // namespace tessera
