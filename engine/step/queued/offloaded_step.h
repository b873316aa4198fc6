#pragma once

// See docs/glossary.md: tier.

#include <memory>
#include <optional>
#include <vector>

#include "engine/device/accelerator.h"
#include "engine/memory/make_plan.h"
#include "optim/optimizer.h"
#include "runtime/comm/collectives.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// Chooses whether the GPU or the CPU updates a GPU's masters and moments that lie in its host's memory, if the
/// strategy leaves this open (kAuto). It measures on all ranks at once, since they may share the bus and the processor.
/// The memory for measuring is freed afterwards. The slowest rank decides, so all ranks make the same choice. Rank 0
/// logs the choice with the measured numbers. The choice is the GPU without a measurement if the program has a rule for
/// elements, if the plan has records that the CPU cannot update, or if "durable" needs the same choice of "auto" tiers
/// in each run. The choice is the CPU if only the plan with updates on the CPU fits memory.limit. The result has no
/// value if there is nothing to choose. `scene`: the scene of the plan that is to be made. It is collective over
/// `control`.
std::optional<OffloadedStep> choose_offloaded_step(const std::vector<std::unique_ptr<Unit>>& units,
                                                   const Strategy& strategy, const PlanScene& scene,
                                                   const Optimizer& optimizer, Accelerator& accelerator,
                                                   Collectives& control);

/// The speeds of a rank. The seconds of an update by the CPU, and of an update by the GPU, follow from these speeds.
struct OffloadSpeeds {
  double to_gpu = 0, to_host = 0;  ///< bytes per second, in one direction only
  double both_ways = 0;            ///< bytes per second in each direction, both at once
  double updated = 0;              ///< elements per second, by the CPU
};

/// The seconds that a step needs in addition to its computation if the CPU updates, and if the GPU updates.
struct OffloadSeconds {
  /// if the CPU updates; this includes all copies of gradients, also those during backward, while copies of new
  /// parameters overlap with the update
  double on_cpu = 0;
  double on_gpu = 0;  ///< if the GPU updates: copies of records both ways at once, of gradients, and of parameters
};
/// `on_cpu`, `on_gpu`: the plans of the two choices.
OffloadSeconds seconds_of(const OffloadSpeeds& speeds, const MemoryPlan& on_cpu, const MemoryPlan& on_gpu);

}  // namespace tessera
