#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "planner/modes/mode_cost.h"
#include "planner/predicted_step.h"
#include "planner/rank_speeds.h"

namespace tessera {

/// A simulated run of ranks that each have their own clock, or of replicas that meet only in outer steps.
struct ModeWorld {
  /// Seconds from the start of the run to the end of its last step. If parameter servers are busier than the ranks, the
  /// run takes longer (ModeCost::served_s).
  double seconds = 0;
  std::vector<std::int64_t> steps = {};  ///< [rank]: number of the rank's gradients that counted
  std::int64_t dropped = 0;              ///< number of gradients that came too late to count
  double staleness_mean = 0;             ///< mean age of gradients that are not summed (StepResult::staleness_mean)
  std::int64_t staleness_max = 0;
  bool waits_for_servers = false;  ///< whether servers are busier than the ranks
  ModeTimeline timeline = {};      ///< the steps of all ranks, without the time that busier servers add
  std::string trace = {};          ///< events of a rank's pulls, compute, waits and pushes (SimulatedWorld::trace)
};

/// The largest number of pieces of work (ModeCost::pieces_s) that are simulated, over all steps of all ranks. A step
/// counts as at least 64 pieces.
constexpr std::int64_t kMostModePieces = 1 << 27;

/// Simulates a run of as many gradients as `options.steps` synchronous steps have (play_mode); backups drop some of
/// them. `tessera plan` calls it for ranks that are alike, and `tessera simulate` calls it for ranks that differ.
///
/// Errors: 64 if options are out of range (check_world), or if the run has more than kMostModePieces pieces.
absl::StatusOr<ModeWorld> simulate_mode(const ModeCost& cost, int ranks, const WorldOptions& options);

/// Returns the costs of replicas that meet at outer steps (SyncConfig::makes_outer_steps). `step`: the step of a
/// replica, as predict_step predicts it from the other arguments.
ModeCost cost_of_outer_steps(const PredictedStep& step, const MemoryPlan& plan, const StepProfile& profile,
                             const MeshLinks& links);

}  // namespace tessera
