#pragma once

// See docs/glossary.md: agreement, flat group, slot, unit.

#include <absl/status/statusor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "planner/script/step_script.h"

namespace tessera {

/// The part of a step that takes longest on its own. A step takes at least as long as this part, even if all parts
/// overlap.
enum class StepBound { kCompute, kShardWire, kReplicateWire, kAgreement };
/// Returns "compute", "the wire on the shard axis", "the wire on the replicate axis", "the agreement of all ranks".
std::string name_of(StepBound bound);

/// The use of a group's wire in a step.
struct PredictedWire {
  double busy_s = 0;            ///< seconds in which some call was under way, or the rank computed a sum in shared
                                ///< memory
  std::int64_t calls = 0;       ///< number of all-gathers and reductions of flat groups, and of barriers
  std::int64_t sent_bytes = 0;  ///< bytes that one rank sends
  double latency_s = 0;         ///< sum of the latencies of all calls
  double transfer_s = 0;        ///< sum of the transfer times of all calls, each as if no other call used the wire
};

/// The time of a training step, and its parts. It is the time of each step from the second step on.
///
/// `seconds` is the sum of the parts, except for rounding. Exposed seconds are those in which the rank neither computes
/// nor updates.
struct PredictedStep {
  double seconds = 0;
  double compute_s = 0;  ///< forward and backward of all microbatches
  double update_s = 0;   ///< the update of this rank's part
  double rest_s = 0;     ///< StepProfile::rest_seconds
  /// The seconds by which compute, update and rest take longer because the transport uses cores (Links::cpu_s_per_byte,
  /// CodingFit).
  double stretch_s = 0;
  double exposed_gather_s = 0;     ///< seconds of waiting for parameters
  double exposed_reduction_s = 0;  ///< seconds of waiting for sums of gradients, or of computing them in shared memory
  double exposed_publish_s = 0;    ///< seconds of waiting for updated values, after and during the update
  double agreement_s = 0;          ///< seconds of the agreement of all ranks on loss and norm
  double exposed_outer_s = 0;      ///< seconds of waiting for other replicas ("sync"), as a mean over the steps between
                                   ///< outer steps
  PredictedWire shard, replicate;  ///< the traffic of each axis, without the agreement
  StepBound bound = StepBound::kCompute;
  std::vector<std::string> left_out;  ///< sentences that name the parts of the plan whose time is not predicted

  std::int64_t sent_bytes() const { return shard.sent_bytes + replicate.sent_bytes; }
  /// Returns the exposed seconds and the seconds of the agreement.
  double communication_s() const {
    return exposed_gather_s + exposed_reduction_s + exposed_publish_s + agreement_s + exposed_outer_s;
  }
  /// Returns T_comm / (T_comp + T_comm), the fraction s from which tessera/scaling.h computes a speed-up. It is 0 for
  /// an empty step.
  double communication_share() const { return seconds > 0 ? communication_s() / seconds : 0.0; }
  /// Returns the seconds of compute, update and rest, without stretch_s.
  double work_s() const { return compute_s + update_s + rest_s; }
};

/// Simulates a step of ranks that are all alike (StepClock). `plan` gives the work and its order, `profile` gives the
/// times for which one rank computes, and `links` gives the times of calls.
///
/// **Included** are:
///
/// * gathers on demand and ahead of use, with the plan's slots and the choice of the unit that loses its slot;
/// * reductions in the background, in shared memory or in the call, with the plan's lags;
/// * a wire that gathers and reductions share equally, and a second axis;
/// * microbatches, updates in backward, and all-gathers of updated values while the update proceeds;
/// * the bytes of codecs with fewer bits, of PowerSGD and of top-k;
/// * one copy in shared memory;
/// * outer steps (outer_cost.h), as they are after sync.start_step.
///
/// **Not included** are:
///
/// * disks, saves, commits and broadcasts of buffers;
/// * the exchange of matrices (`left_out` has a sentence about it);
/// * computation for compression methods, except that of codecs with fewer bits (CodingFit);
/// * a wire that both axes share, or that another job uses;
/// * operators that read several units at the same time;
/// * events at the beginning of a run: the first step, the first gradients, a change of the set of used parameters.
///
/// Errors: those of script_of_step.
absl::StatusOr<PredictedStep> predict_step(const MemoryPlan& plan, const StepProfile& profile, const MeshLinks& links);

}  // namespace tessera
