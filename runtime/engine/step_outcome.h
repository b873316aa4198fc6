#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "optim/device_kernels.h"

namespace tessera {

/// What a GPU decided about one step: on its way to the host until the device has come to the end of the step.
class StepOutcome {
 public:
  /// `pinned` receives the decision and is not written again before the outcome is known.
  StepOutcome(std::int64_t step, std::shared_ptr<const std::byte> pinned, std::unique_ptr<DeviceKernels::Mark> end)
      : step_(step), pinned_(std::move(pinned)), end_(std::move(end)) {}

  bool is_known() const { return decision_ || end_->passed(); }
  /// Waits if need be. Warns of a skipped step, once. Throws tessera::Error (70) if ranks gathered units in different
  /// orders: then no rank has updated anything.
  const DeviceDecision& wait();

 private:
  const std::int64_t step_;
  std::shared_ptr<const std::byte> pinned_;
  std::unique_ptr<DeviceKernels::Mark> end_;
  std::optional<DeviceDecision> decision_;
};

void warn_of_overflow(std::int64_t step, double loss_scale);

}  // namespace tessera
