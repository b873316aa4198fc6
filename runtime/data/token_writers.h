#pragma once

#include <absl/status/status.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "runtime/data/token_type.h"

namespace tessera {

/// Writes `prefix.idx` and `prefix.bin` as Megatron does, with one sequence for each document. Errors: 64 for kU32,
/// which has no code in this format; 65 if a token does not fit the type, or if a document has more than 2^31 - 1
/// tokens; 73 if a file cannot be created, 74 if it cannot be written.
absl::Status write_megatron(const std::filesystem::path& prefix, std::span<const std::vector<std::int64_t>> documents,
                            TokenType type);

}  // namespace tessera
