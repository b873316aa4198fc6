#pragma once

#include <cstddef>
#include <span>

#include "runtime/comm/collectives.h"
#include "tessera/dtype.h"

namespace tessera {

/// Numbers in the lossy forms of WireForm: first the fp32 scales, one for each run of kCodecBlock elements, then the codes. A run
/// whose largest magnitude is below the smallest normal number times 127 becomes zeros; one with an infinity or a NaN becomes NaNs.
inline constexpr std::size_t kCodecBlock = 256;

/// Bytes of `numel` elements in `form`, which is lossy; a multiple of 4.
std::size_t encoded_bytes(WireForm form, std::size_t numel);

/// Bytes of one rank's `numel` elements on the wire: of `dtype` where `form` is not lossy. What packing (lossless.h) saves of them
/// is not known before.
std::size_t wire_bytes(WireForm form, DType dtype, std::size_t numel);

/// Writes `input[0, numel)` of `dtype` (fp32, bf16, fp16) to `wire`, encoded_bytes long and aligned to 4.
///
/// `residual`, if any, holds [numel] what rounding took earlier: it is added first, and then holds what rounding took now. In runs
/// that are not finite it stays as it was.
void encode(WireForm form, const void* input, DType dtype, std::size_t numel, std::byte* wire,
            float* residual = nullptr);

/// The opposite of `encode`, into `dtype` (fp32, bf16, fp16): rounded to nearest, ties to even, where that is not fp32.
void decode(WireForm form, const std::byte* wire, DType dtype, void* output, std::size_t numel);
inline void decode(WireForm form, const std::byte* wire, float* output, std::size_t numel) {
  decode(form, wire, DType::kF32, output, numel);
}

/// The pairwise tree (pairwise_sum.h) over what was encoded in each of `wires`. `visitor` (which may be null) sees it as elements
/// `offset...` of the output. REQUIRES: offset is a multiple of SumVisitor::kAlignment.
void sum_encoded(WireForm form, std::span<const std::byte* const> wires, float* output, std::size_t numel,
                 SumVisitor* visitor = nullptr, std::size_t offset = 0);

}  // namespace tessera
