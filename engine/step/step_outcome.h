#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "engine/device/exposed_communication.h"
#include "optim/device_kernels.h"
#include "runtime/comm/mesh_groups.h"

namespace tessera {

/// What a GPU decided about one step: on its way to the host until the device has come to the end of the step.
class StepOutcome {
 public:
  /// `pinned` receives the decision and is not written again before the outcome is known.
  /// `waits`: of the step, all before `end`. `axes`: whose calls the step has made; while they live.
  StepOutcome(std::int64_t step, std::shared_ptr<const std::byte> pinned, ExposedCommunication::Intervals waits,
              std::shared_ptr<DeviceKernels::Mark> end, std::weak_ptr<const MeshAxes> axes)
      : step_(step),
        pinned_(std::move(pinned)),
        waits_(std::move(waits)),
        end_(std::move(end)),
        axes_(std::move(axes)) {}

  bool is_known() const { return decision_ || end_->passed(); }
  /// Waits if need be. Warns of a skipped step, once. Throws tessera::Error: a group's failure if one of its calls came
  /// to nothing on the device (MeshAxes::status); 70 if ranks gathered units in different orders: then no rank has
  /// updated anything.
  const DeviceDecision& wait();
  /// In which compute waited for collectives. REQUIRES: wait() has returned.
  double exposed_seconds() const { return exposed_seconds_; }

 private:
  const std::int64_t step_;
  std::shared_ptr<const std::byte> pinned_;
  ExposedCommunication::Intervals waits_;
  std::shared_ptr<DeviceKernels::Mark> end_;
  const std::weak_ptr<const MeshAxes> axes_;
  double exposed_seconds_ = 0;
  std::optional<DeviceDecision> decision_;
};

void warn_of_overflow(std::int64_t step, double loss_scale);

}  // namespace tessera
