#pragma once

#include <cstddef>
#include <span>

#include "runtime/comm/collectives.h"
#include "tessera/dtype.h"

namespace tessera {

/// Lossy codecs of WireForm: first the fp32 scales, one for each run of kCodecBlock elements, then the codes. A run
/// whose largest magnitude is below the smallest normal number times 127 becomes zeros; a run with an infinity or a NaN
/// becomes NaNs.
inline constexpr std::size_t kCodecBlock = 256;

/// Returns the bytes of `numel` elements in `form`, which is lossy; a multiple of 4.
std::size_t encoded_bytes(WireForm form, std::size_t numel);

/// Returns the bytes of one rank's `numel` elements on the wire; those of `dtype` if `form` is not lossy. What packing
/// (lossless.h) saves is not known in advance.
std::size_t wire_bytes(WireForm form, DType dtype, std::size_t numel);

/// Writes `input[0, numel)` of `dtype` (fp32, bf16, fp16) to `wire`, which is encoded_bytes long and aligned to 4.
///
/// `residual` [numel], unless null, holds earlier rounding errors. They are added first, and replaced by the new
/// errors. Runs that are not finite leave `residual` as it was.
void encode(WireForm form, const void* input, DType dtype, std::size_t numel, std::byte* wire,
            float* residual = nullptr);

/// Reverses `encode`, into `dtype` (fp32, bf16, fp16): rounded to nearest, ties to even, unless that is fp32.
void decode(WireForm form, const std::byte* wire, DType dtype, void* output, std::size_t numel);
inline void decode(WireForm form, const std::byte* wire, float* output, std::size_t numel) {
  decode(form, wire, DType::kF32, output, numel);
}

/// Sums what was encoded in each of `wires`, in the pairwise tree (pairwise_sum.h). `visitor` (which may be null) sees
/// the sums as elements `offset...` of the output. REQUIRES: offset is a multiple of SumVisitor::kAlignment.
void sum_encoded(WireForm form, std::span<const std::byte* const> wires, float* output, std::size_t numel,
                 SumVisitor* visitor = nullptr, std::size_t offset = 0);

}  // namespace tessera
