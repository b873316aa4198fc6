#pragma once

// See docs/glossary.md: dealt.

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "planner/rank_speeds.h"
#include "planner/script/step_script.h"

namespace tessera {

/// The result of simulating steps of a world whose ranks may differ.
struct SimulatedWorld {
  /// The seconds of each step, from the moment when the last rank ended the previous step until the last rank ended
  /// this step.
  std::vector<double> seconds;
  double mean_s = 0;
  /// The number of seconds that 10 % of the steps do not exceed, and the number that 90 % do not exceed.
  double p10_s = 0, p90_s = 0;
  /// [rank]: the number of a step's microbatches that the rank computes after they are dealt by the ranks' speeds
  /// ("deal"). It is empty if no microbatches are dealt.
  std::vector<std::int64_t> dealt;
  /// The mean number per step of microbatches that another rank than their owner has completed first, and of
  /// microbatches on which two ranks have spent time (BackupStep). Both are 0 without "deal.backups".
  double made_again = 0, twice = 0;
  std::string trace;  ///< result of StepTrace::events_as_json for the traced ranks
};

/// Simulates the steps of predict_step, but for each rank of the plan's mesh separately. A call begins when the last of
/// its ranks has joined it, and ends for all of them at the same time. If a sum is made in shared memory, a rank
/// computes its share when all ranks have started the sum. A rank that has ended a step begins the next step without
/// waiting for other ranks. If ranks do not differ, the seconds of a step are exactly those of predict_step. If
/// microbatches are dealt by speed, they are dealt by the ranks' speeds from the first step on. A rank that stalls in a
/// step does so before it first computes in the step. If ranks also compute microbatches of slower ranks
/// ("deal.backups"), each step is first played by play_backups, which determines for how long each rank computes.
/// Claims of microbatches take no time here. The all-gather that tells the ranks who made which microbatch takes no
/// time either.
///
/// The cost of a step is proportional to ranks x entries x log(ranks).
///
/// Errors: those of predict_step; those of check_world.
absl::StatusOr<SimulatedWorld> simulate_world(const MemoryPlan& plan, const StepProfile& profile,
                                              const MeshLinks& links, const WorldOptions& options);

}  // namespace tessera
