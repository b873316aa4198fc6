#pragma once

#include <cstddef>
#include <span>

#include "tessera/dtype.h"

namespace tessera {

/// The lossless codec stores floating-point numbers in fewer bytes, with all their bits. Any thread may call these
/// functions.
///
/// Signs and mantissas of gradients and weights look random, and exponents do not. Half of the numbers of a normal
/// distribution have one of two exponents, and 98 % of them have one of seven. A block of 256 elements is therefore
/// written as its signs and mantissas unchanged, and one base exponent. For each element there are 3 bits, which say by
/// how much the element's exponent is below the base exponent. The number 7 in these bits says that the element's
/// exponent is written in full, at the end of the block. Gradients of a GPT take 0.85 of their original bytes in fp32,
/// and 0.70 in bf16. If all fp32 numbers of a block are exact in bf16, the low halves are left out. This is the case
/// for the gradients of one microbatch in bf16. A block of zeros (rows of an embedding that no token used) takes one
/// byte. Blocks that would not get smaller are copied.
inline constexpr std::size_t kLosslessBlock = 256;

/// Returns whether numbers of `dtype` can be packed: fp32 and bf16.
bool can_pack(DType dtype);

/// Returns the largest number of bytes that `pack` writes for `numel` elements: their own bytes, and one for each
/// block.
std::size_t most_packed_bytes(DType dtype, std::size_t numel);

/// Writes `input[0, numel)` of `dtype` to `packed`, which has most_packed_bytes, and returns the number of bytes
/// written. REQUIRES: can_pack(dtype).
std::size_t pack(DType dtype, const void* input, std::size_t numel, std::byte* packed);

/// Reverses `pack`. Returns false if `packed` is no result of `pack` for `numel` elements of `dtype`. The content of
/// `output` is then undefined. REQUIRES: can_pack(dtype).
bool unpack(DType dtype, std::span<const std::byte> packed, void* output, std::size_t numel);

}  // namespace tessera
