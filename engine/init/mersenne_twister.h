#pragma once

#include <array>
#include <cstdint>

namespace tessera::mt19937 {

// These functions make the Mersenne Twister MT19937 skip numbers without making them (Matsumoto and Nishimura 1998,
// doi:10.1145/272991.272995). LibTorch's generator on the CPU is an MT19937. It makes words of 32 bits in blocks of
// 624, each block from the one before it.

constexpr int kWords = 624, kMiddle = 397;
using Block = std::array<std::uint32_t, kWords>;

/// Replaces `block` by the block after it.
void next_block(Block& block);

/// Replaces `block` by the block that comes `blocks` blocks after it. A jump over 2^40 blocks takes about as long as
/// 5000 calls of `next_block`. It multiplies by a power of x, modulo the characteristic polynomial of the recurrence
/// (Haramoto, Matsumoto, Nishimura, Panneton and L'Ecuyer 2008, doi:10.1287/ijoc.1070.0251). REQUIRES: blocks > 0.
void jump(Block& block, std::uint64_t blocks);

/// From this number of blocks on, `jump` is faster than as many calls of `next_block`.
constexpr std::uint64_t kWorthJump = 8192;

}  // namespace tessera::mt19937
