#pragma once

#include <absl/status/status.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "runtime/data/token_type.h"

namespace tessera {

/// Writes tokens as llm.c does: with kU16 as a GPT-2 file, with kU32 as a Llama-3 file. Errors: 64 for other types; 65
/// if a token does not fit the type, or if there are more than 2^31 - 1 tokens; 73 if the file cannot be created, 74 if
/// it cannot be written.
absl::Status write_llmc(const std::filesystem::path& path, std::span<const std::int64_t> tokens, TokenType type);

/// Writes `prefix.idx` and `prefix.bin` as Megatron does, with one sequence for each document. Errors: 64 for kU32,
/// which has no code in this format; and those of write_llmc.
absl::Status write_megatron(const std::filesystem::path& prefix, std::span<const std::vector<std::int64_t>> documents,
                            TokenType type);

}  // namespace tessera
