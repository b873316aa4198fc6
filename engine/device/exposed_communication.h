#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "optim/device_kernels.h"
#include "sharding/compute_device.h"

namespace tessera {

/// Collects the intervals of a step in which a GPU's computation waited for collectives. Together they are the exposed
/// communication: the part that computation does not hide.
class ExposedCommunication final : public QueueClock {
 public:
  using Intervals = std::vector<std::unique_ptr<DeviceKernels::Interval>>;

  explicit ExposedCommunication(DeviceKernels& kernels) : kernels_(kernels) {}

  void begin() override { intervals_.push_back(kernels_.begin_interval()); }
  void end() override { intervals_.back()->end(); }
  /// Returns the intervals since the last call.
  Intervals take() { return std::exchange(intervals_, {}); }

 private:
  DeviceKernels& kernels_;
  Intervals intervals_;
};

}  // namespace tessera
