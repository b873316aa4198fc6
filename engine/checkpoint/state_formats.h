#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace tessera {

/// Returns whether states of the format `from` (SavedState::format) can be loaded as states of the format `to`: equal
/// formats, "fp32" as "bf16", and "bf16" as "fp32". Conversion is needed for a checkpoint of a run with another
/// /optimizer/state_dtype.
bool can_convert(const std::string& from, const std::string& to);
/// Returns whether `convert_state` keeps each number exactly.
bool is_exact(const std::string& from, const std::string& to);

/// Converts the numbers of `from` to the format of `to`; bf16 is rounded to nearest. REQUIRES: can_convert is true, and
/// both spans hold equally many numbers.
void convert_state(const std::string& from_format, std::span<const std::byte> from, const std::string& to_format,
                   std::span<std::byte> to);

}  // namespace tessera
