#pragma once

#include <absl/status/status.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "runtime/data/token_type.h"

namespace tessera {

/// Writes tokens as llm.c does: kU16 gives its GPT-2 file, kU32 its Llama-3 file. Errors: 64 other types; 65 a token
/// that does not fit the type, or more than 2^31 - 1 tokens; 73 cannot create, 74 cannot write.
absl::Status write_llmc(const std::filesystem::path& path, std::span<const std::int64_t> tokens, TokenType type);

/// Writes `prefix.idx` and `prefix.bin` as Megatron does, one sequence a document. Errors: 64 for kU32, which has no
/// code in this format; else those of write_llmc.
absl::Status write_megatron(const std::filesystem::path& prefix, std::span<const std::vector<std::int64_t>> documents,
                            TokenType type);

}  // namespace tessera
