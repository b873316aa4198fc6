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

/// What a rank's step consists of where each rank has a clock of its own ("sync" asynchronous, hogwild and backups),
/// or where replicas meet every now and then.
struct ModeCost {
  ModeRule rule = {};
  std::vector<double> pieces_s = {};  ///< compute of a microbatch, in pieces that vary by themselves (WorldOptions)
  std::int64_t microbatches = 1;      ///< number of microbatches in a step
  double rest_s = 0;                  ///< StepProfile::rest_seconds; at outer steps, all else in a replica's step
  ModeCosts costs = {};
  /// The seconds for which the parameter servers are busy with one rank's step, all of them at once; 0 without servers.
  double served_s = 0;
  std::vector<std::string> left_out = {};  ///< sentences that name what is not predicted

  /// Returns the seconds of compute of a step on a rank that is not slow.
  double compute_s() const;
};

/// Returns the costs of a plan whose ranks have common parameters (SyncConfig::has_common_parameters).
///
/// Ranks that own the shards copy all values in a pull, as fast as `links` gather, and update all of them in a push, as
/// fast as one rank does (StepProfile::update_seconds). Hogwild copies nothing. With backups the first ranks of a step
/// sum the gradients of a part of the parameters each, and update it.
///
/// With servers each unit is pulled while the one before it computes, and gradients are sent while backward goes on; a
/// step waits for what does not fit in there, for the first unit, and for the update by `servers` of them.
///
/// `links`: in shared memory, or to servers. Errors: those of units_of; 78 for replicas of several ranks
/// (AsynchronousConfig::replica_ranks), whose sums and gathers are not predicted.
absl::StatusOr<ModeCost> mode_cost(const MemoryPlan& plan, const StepProfile& profile, const Links& links, int servers);

}  // namespace tessera
