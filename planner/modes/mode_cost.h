#pragma once

// See docs/glossary.md: unit.

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "planner/measured/links.h"
#include "planner/measured/step_profile.h"
#include "planner/modes/mode_clock.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// The times of the parts of a rank's step, if each rank has its own clock ("sync" asynchronous, hogwild and backups),
/// or if replicas meet only in outer steps.
struct ModeCost {
  ModeRule rule = {};
  std::vector<double> pieces_s = {};  ///< compute of a microbatch, in pieces that vary separately (WorldOptions)
  std::int64_t microbatches = 1;      ///< number of microbatches in a step
  double rest_s = 0;                  ///< StepProfile::rest_seconds; with outer steps: all other seconds of a replica's
                                      ///< step
  ModeCosts costs = {};
  /// The seconds for which all parameter servers together are busy with one rank's step. It is 0 if there are no
  /// servers.
  double served_s = 0;
  std::vector<std::string> left_out = {};  ///< sentences that name what is not predicted

  /// Returns the seconds of compute of a step on a rank that is not slow.
  double compute_s() const;
};

/// Returns a cost that has only the compute of the plan's microbatches.
ModeCost cost_of_compute(const MemoryPlan& plan, const StepProfile& profile);

/// Returns the costs of a plan whose ranks have common parameters (SyncConfig::has_common_parameters).
///
/// If ranks own the shards, a pull copies all values, as fast as an all-gather over `links` does. A push updates all
/// values, as fast as one rank updates them (StepProfile::update_seconds). Hogwild copies nothing. If there are
/// backups, each of the ranks that come first in a step sums the gradients of a part of the parameters, and updates
/// this part.
///
/// If there are servers, each unit is pulled while the unit before it computes, and gradients are sent while backward
/// goes on. A step waits for transfers that take longer than this compute, for the pull of the first unit, and for the
/// update by `servers` servers.
///
/// `links`: the links between ranks in shared memory, or those to the servers. Errors: those of units_of; 78 for
/// replicas of several ranks (AsynchronousConfig::replica_ranks), whose sums and gathers are not predicted.
absl::StatusOr<ModeCost> mode_cost(const MemoryPlan& plan, const StepProfile& profile, const Links& links, int servers);

}  // namespace tessera
