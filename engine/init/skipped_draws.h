#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tessera {

// Moving the CPU's generator on without the numbers: some twenty times as fast as drawing them. Its engine is the
// Mersenne Twister MT19937 (Matsumoto and Nishimura 1998, doi:10.1145/272991.272995), which makes 624 words of 32 bits
// from the 624 before them.

/// How many words LibTorch's operator draws to fill a contiguous fp32 tensor of `numel` elements; empty where that is not
/// known. Known: aten::uniform_ (one an element), and aten::normal_ from 16 elements on (one an element, and the last 16
/// again where they do not end a group of 16).
std::optional<std::uint64_t> words_to_fill(const std::string& op, std::int64_t numel);

/// Leaves `generator`, one of the CPU, as if `words` words had been drawn from it.
void skip_words(at::Generator& generator, std::uint64_t words);

}  // namespace tessera
