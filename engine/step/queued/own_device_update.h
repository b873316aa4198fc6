#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/memory/state_views.h"
#include "engine/step/queued/queued_context.h"
#include "engine/step/rules/element_update.h"
#include "optim/device_kernels.h"
#include "sharding/unit.h"

namespace tessera {

/// A rule for elements that the program defines (ElementwiseOptimizer), on a GPU. Its operators are queued like all
/// others. They run portion by portion, between a kernel that reads masters and one that writes the new masters. The
/// rule gets its numbers from the host, and is not called for unused parameters. So the host must wait for the device's
/// decision before it queues an update.
class OwnDeviceUpdate {
 public:
  /// `groups`, `parameters`: numbers of trainable groups and trainable parameters.
  OwnDeviceUpdate(const QueuedContext& context, std::size_t groups, std::size_t parameters);

  /// Returns the slice without the rule's own states, as OwnOptimizer::bare() takes it.
  OptimizerSlice without_states(const OptimizerSlice& slice) const { return optimizer_of({}).without_states(slice); }

  /// Begins the step of a group. `index`: its number among trainable groups. `first`: the number of its first parameter
  /// among trainable parameters. `used` says which of all trainable parameters take part in the step; only their step
  /// counts grow.
  void begin(std::size_t index, const FlatGroup& group, std::size_t first, std::span<const char> used);
  /// Queues the update of a piece of the group. `run` and `view`: the piece, in memory that the device can access.
  /// Throws the errors of OwnOptimizer::step.
  void update(std::size_t index, const FlatGroup& group, const DeviceRun& run, const StateView& view,
              const UpdateRates& rates, const StepTables& tables);
  /// Takes the numbers in `options` for the next step.
  void follow(const UpdateOptions& options) { elements_.follow(options); }
  /// Implements Step::resume. `steps` [trainable parameter]: the number of steps in which the parameter took part.
  void resume(std::span<const std::int64_t> steps) { steps_.assign(steps.begin(), steps.end()); }

 private:
  const OwnOptimizer& optimizer_of(const UpdateRun& run) const;

  ElementUpdate elements_;
  DeviceKernels& kernels_;
  const c10::Device device_;
  std::vector<std::int64_t> steps_;           ///< applied steps of each trainable parameter
  std::vector<std::vector<UpdateRun>> runs_;  ///< [group]: runs of this step
};

}  // namespace tessera
