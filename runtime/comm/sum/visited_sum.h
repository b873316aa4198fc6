#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Shows `sums[0, numel)`, which are elements `offset...` of an output, to `visitor` (which may be null), in pieces
/// that fit the first-level cache. REQUIRES: offset is a multiple of SumVisitor::kAlignment.
void visit_sums(SumVisitor* visitor, std::size_t offset, const float* sums, std::size_t numel);

/// Writes pairwise_sum (pairwise_sum.h) of `sources` into each of `outputs`, piece by piece, in one pass: each source
/// is read once, each output written once, past the caches if that pays (streaming.h). `visitor` (which may be null)
/// sees each piece as soon as it is made, as elements `offset...` of the output. An output may be one of the sources.
/// REQUIRES: those of pairwise_sum and visit_sums; at least one output.
void visited_sum(std::span<const void* const> sources, DType dtype, std::span<float* const> outputs, std::size_t numel,
                 SumVisitor* visitor = nullptr, std::size_t offset = 0);

/// A second place that sums are written to, for other ranks to read; `to` is null if there is none.
struct ShownSums {
  float* to = nullptr;
  bool streams = false;  ///< whether it is written past the caches
};

/// A window of an output: `numel` of its `whole` elements, from element `offset` on (a visitor is told this offset).
struct SumWindow {
  std::size_t offset = 0;
  std::size_t numel;
  std::size_t whole;
};

/// Makes the sum of visited_sum for a window of a larger call's output; `output` is where the window begins. The size
/// of the whole decides whether the window is written past the caches. The larger call ends the stream (end_stream).
void visited_window_sum(std::span<const void* const> sources, DType dtype, float* output, const ShownSums& shown,
                        const SumWindow& window, SumVisitor* visitor = nullptr);

/// Returns OK if a transport that leaves sums to a device can make this sum: of fp32, bf16 or fp16, without a
/// SumVisitor, which is host code.
absl::Status check_device_sum(std::string_view label, DType dtype, const SumVisitor* visitor);

}  // namespace tessera
