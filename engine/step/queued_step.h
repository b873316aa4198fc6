#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/device/accelerator.h"
#include "engine/step/publisher.h"
#include "engine/step/step_agreement.h"
#include "engine/step/step_outcome.h"
#include "optim/device_kernels.h"
#include "optim/optimizer.h"
#include "runtime/comm/mesh.h"
#include "runtime/config/strategy.h"
#include "sharding/arena.h"
#include "sharding/compute_device.h"
#include "sharding/reducer.h"
#include "sharding/unit.h"

namespace tessera {

/// The step of an Engine on a GPU: norm, agreement, decision and update, all queued and nothing waited for. What ranks
/// agree on, and what follows from it, is what StepAgreement, Engine::step and Update do on the CPU, bit for bit.
///
/// The host may be kMostStepsInFlight steps ahead of the device; then it waits for the oldest one.
class DeviceStep {
 public:
  DeviceStep(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshAxes& axes,
             const Reducer& reducer, const Strategy& strategy, const Optimizer& optimizer, Accelerator& accelerator);

  /// Adds `loss` (a scalar on the device) to the step's: the mean over `microbatches` of them.
  void add_loss(const at::Tensor& loss, std::int64_t microbatches);
  /// A scalar, fp32, on the device: what the next backward multiplies its loss by.
  const at::Tensor& loss_scale() const { return loss_scale_; }

  /// Collective. `local.loss` is add_loss's.
  std::shared_ptr<StepOutcome> run(const LocalStep& local);

  /// The latest step's decision; waits for it.
  DeviceDecision latest() const;

 private:
  struct Group {
    FlatGroup* group;
    DeviceRun run;                              ///< of this rank's optimizer part
    std::size_t max_nodes = 0, first_node = 0;  ///< in a message
  };
  struct InFlight {
    std::shared_ptr<std::byte> message, decision;  ///< pinned: the host's part of a message; what comes back
    std::shared_ptr<StepOutcome> outcome;          ///< of the step that last used them
  };

  void plan_message();
  void allocate(const LossScalerState& scaler);
  void fill_tables();
  void send_host_part(InFlight& slot, const LocalStep& local);
  StepRequest request() const;
  template <class T>
  T* take(std::size_t count);
  template <class T>
  T* put(const std::vector<T>& values);

  const MemoryPlan& plan_;
  const std::shared_ptr<const MeshAxes> axes_;
  const Reducer& reducer_;
  const Strategy& strategy_;
  DeviceKernels& kernels_;
  ExposedCommunication& exposed_;
  const ComputeDevice device_;
  Publisher publisher_;
  StepRequest request_;  ///< but for what changes from step to step
  std::vector<Group> groups_;
  std::size_t parameters_ = 0, nodes_offset_ = 0, message_bytes_ = 0, scratch_bytes_ = 0;
  std::vector<Arena> memory_;  ///< of all that follows
  std::byte* message_ = nullptr;
  std::byte* messages_ = nullptr;
  void* scratch_ = nullptr;
  StepTables tables_;
  at::Tensor loss_, loss_scale_;  ///< of `message_` and of the decision
  std::array<InFlight, kMostStepsInFlight> ring_;
  std::unique_ptr<DeviceKernels::Mark> uploaded_, messages_read_;  ///< of the host's part; of the step before
  std::shared_ptr<DeviceKernels::Mark> downloaded_;                ///< of the latest decision
  std::int64_t steps_ = 0;
};

}  // namespace tessera
