#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/memory/state_views.h"
#include "engine/step/element_update.h"
#include "optim/device_kernels.h"
#include "sharding/unit.h"

namespace tessera {

/// A program's own rule for elements (ElementwiseOptimizer) on a GPU: its operators are queued as all others, portion by portion, between a
/// kernel that reads masters and one that takes in new ones. The rule gets numbers, and parameters that are not used do not come to it: so
/// the host has to know what the device decided before it queues an update.
class OwnDeviceUpdate {
 public:
  /// `rates`, `kernels` outlive this.
  OwnDeviceUpdate(const Strategy& strategy, const OwnRules& own_rules, const LearningRates& rates,
                  DeviceKernels& kernels, c10::Device device);

  /// Of what is in no group: masters, parameters and averages.
  const OwnOptimizer& everybodys() const { return optimizer_of({}); }

  /// Adds a flat group that trains, in the order of units.
  void add(const FlatGroup& group);
  /// Queues the update of group `index`. `run`: its part in the device's memory, `view` the same. `used`: of its parameters, and more: which
  /// of them take part in this step. Throws as OwnOptimizer::step.
  void update(std::size_t index, std::span<const char> used, const DeviceRun& run, const StateView& view,
              const UpdateRates& rates, const StepTables& tables);
  /// Step::resume: of each parameter, in how many steps it took part.
  void resume(std::span<const std::int64_t> steps) { steps_.assign(steps.begin(), steps.end()); }

 private:
  struct Group {
    const FlatGroup* group;
    std::size_t first_parameter;
  };
  const OwnOptimizer& optimizer_of(const UpdateRun& run) const;

  const ElementUpdate elements_;
  DeviceKernels& kernels_;
  const c10::Device device_;
  std::vector<Group> groups_;
  std::vector<std::int64_t> steps_;  ///< applied, by trainable parameter
  std::vector<UpdateRun> runs_;
};

}  // namespace tessera
