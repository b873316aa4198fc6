#pragma once

#include <cstddef>
#include <span>

#include "tessera/dtype.h"

namespace tessera {

/// Floating-point numbers in fewer bytes, and all of their bits.
///
/// Of gradients and weights, signs and mantissas are noise, and exponents are not: of a normal distribution, half of the numbers have one
/// of two exponents, and all but a fiftieth one of seven. So a block of 256 elements is written as its signs and mantissas as they are, an
/// exponent, and for each element 3 bits that say by how much its own is below; 7 says that its own is written in full behind the others.
/// Gradients of a GPT take 0.85 of fp32's bytes and 0.70 of bf16's. Of fp32 numbers that all are bf16's (of one microbatch in bf16) the low
/// halves are left out, and blocks of zeros (rows of an embedding that no token had) are one byte. What would not get smaller is copied.
inline constexpr std::size_t kLosslessBlock = 256;

/// Whether numbers of `dtype` can be packed: fp32 and bf16.
bool can_pack(DType dtype);

/// The most bytes that `pack` writes for `numel` elements: those that they have, and one for each block.
std::size_t most_packed_bytes(DType dtype, std::size_t numel);

/// Writes `input[0, numel)` of `dtype` to `packed`, which has most_packed_bytes, and returns how many it wrote. REQUIRES: can_pack(dtype).
std::size_t pack(DType dtype, const void* input, std::size_t numel, std::byte* packed);

/// The opposite of `pack`. False where `packed` is not what `pack` writes for `numel` elements of `dtype`; then `output` holds anything.
/// REQUIRES: can_pack(dtype).
bool unpack(DType dtype, std::span<const std::byte> packed, void* output, std::size_t numel);

}  // namespace tessera
