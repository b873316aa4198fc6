#pragma once

#include <cstdint>
#include <span>

#include "sharding/compute_device.h"

namespace tessera {

/// Copies and adds sums of gradients in memory of the device that trains, for "reproducible". A GPU's work is queued
/// on the current stream. The CPU and a GPU give the same bits. MicrobatchTree and BlockSums use it.
class SumMemory {
 public:
  explicit SumMemory(ComputeDevice device) : device_(device) {}

  /// Copies `numel` fp32 elements, unless both places are the same.
  void copy(const float* from, std::int64_t numel, float* to) const;
  /// Writes zeros.
  void clear(float* values, std::int64_t numel) const;
  /// Does the same as joined_sum. A GPU leaves intermediate sums in `last`.
  void join(std::span<const float* const> waiting, float* last, float* output, std::int64_t numel) const;

 private:
  const ComputeDevice device_;
};

}  // namespace tessera
