#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Shows `sums[0, numel)` to `visitor` (which may be null), in pieces that fit the first-level cache. The sums are
/// elements `offset...` of an output. REQUIRES: offset is a multiple of SumVisitor::kAlignment.
void visit_sums(SumVisitor* visitor, std::size_t offset, const float* sums, std::size_t numel);

/// Writes pairwise_sum (pairwise_sum.h) of `sources` into each of `outputs`, piece by piece, in one pass. Each source
/// is read once, and each output is written once, past the caches if that is faster (streaming.h). `visitor` (which may
/// be null) sees each piece as soon as it is made, as elements `offset...` of the output. An output may be one of the
/// sources. REQUIRES: those of pairwise_sum and visit_sums; at least one output.
void visited_sum(std::span<const void* const> sources, DType dtype, std::span<float* const> outputs, std::size_t numel,
                 SumVisitor* visitor = nullptr, std::size_t offset = 0);

/// A second place to which sums are written, for other ranks to read. `to` is null if there is none.
struct ShownSums {
  float* to = nullptr;
  bool streams = false;  ///< whether it is written past the caches
};

/// A window of an output: `numel` of its `whole` elements, from element `offset` on (a visitor gets this offset).
struct SumWindow {
  std::size_t offset = 0;
  std::size_t numel;
  std::size_t whole;
};

/// Makes the sum of visited_sum for a window of a larger call's output. `output` is where the window begins. The size
/// of the whole decides whether the window is written past the caches. The larger call ends the stream (end_stream).
void visited_window_sum(std::span<const void* const> sources, DType dtype, float* output, const ShownSums& shown,
                        const SumWindow& window, SumVisitor* visitor = nullptr);

/// Returns OK if a transport that leaves sums to a device can make this sum. The dtype must be fp32, bf16 or fp16, and
/// there must be no SumVisitor, which is host code.
absl::Status check_device_sum(std::string_view label, DType dtype, const SumVisitor* visitor);

}  // namespace tessera
