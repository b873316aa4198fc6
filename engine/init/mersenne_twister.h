#pragma once

#include <array>
#include <cstdint>

namespace tessera::mt19937 {

// The Mersenne Twister MT19937 (Matsumoto and Nishimura 1998, doi:10.1145/272991.272995), which is the generator of
// LibTorch on the CPU, moved on without making its numbers. It makes words of 32 bits in blocks of 624, each block from
// the one before it.

constexpr int kWords = 624, kMiddle = 397;
using Block = std::array<std::uint32_t, kWords>;

/// Replaces `block` by the block after it.
void next_block(Block& block);

/// Replaces `block` by the block that comes `blocks` blocks after it. Takes about as long for 2^40 blocks as
/// `next_block` takes for 5000: it multiplies by a power of x modulo the characteristic polynomial of the recurrence
/// (Haramoto, Matsumoto, Nishimura, Panneton and L'Ecuyer 2008, doi:10.1287/ijoc.1070.0251).
/// REQUIRES: blocks > 0.
void jump(Block& block, std::uint64_t blocks);

/// From how many blocks on `jump` is faster than as many calls of `next_block`.
constexpr std::uint64_t kWorthJump = 8192;

}  // namespace tessera::mt19937
