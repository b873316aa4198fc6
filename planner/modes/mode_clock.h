#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace tessera {

/// The rule by which ranks wait for each other.
struct ModeRule {
  enum class Kind : std::uint8_t {
    kMeeting,       ///< ranks add up gradients or weights once in `every` steps, and each rank makes all steps
    kAsynchronous,  ///< a rank pushes its gradient as soon as it is computed, and begins the next step
    kBackups,       ///< a step is over once all ranks but `spare` have come; ranks that come later drop their gradients
  };
  Kind kind = Kind::kMeeting;
  std::int64_t every = 1;                          ///< kMeeting: number of steps between two meetings of a fragment
  std::int64_t delay = 0;                          ///< kMeeting: steps that ranks make while a fragment is summed
  std::optional<std::int64_t> max_staleness = {};  ///< kAsynchronous: AsynchronousConfig::max_staleness
  std::int64_t spare = 0;                          ///< kBackups: SyncConfig::backups, below the number of ranks
};

/// The seconds of a fragment's meeting. A fragment is a part of the model that has meetings of its own
/// (SyncConfig::fragments).
struct FragmentCosts {
  double sum_s = 0;      ///< seconds of the sum, from the moment at which the last rank has come
  double publish_s = 0;  ///< seconds from the moment at which a rank has the sum until it continues
};

/// The seconds of a rank's step in addition to its compute.
struct ModeCosts {
  double pull_s = 0;
  double push_s = 0;  ///< seconds of a push; kMeeting: seconds at the end of a step without a meeting
  /// Seconds of a meeting, from the moment at which the last rank has come. If there are `fragments`: the seconds for
  /// which ranks that are alike wait in `every` steps.
  double meet_s = 0;
  /// kMeeting: the fragments, which have their turns one after the other, spread over `every` steps. If it is empty,
  /// the whole model is one fragment that takes `meet_s`. REQUIRES: `every` is at least the number of fragments, and at
  /// least this number times ModeRule::delay.
  std::vector<FragmentCosts> fragments = {};
};

/// A rank's step whose gradient counts. Times are seconds from the start of the run.
struct ModeStep {
  int rank = 0;
  std::int64_t step = 0;  ///< number among the steps of this rank, from 1
  double begin_s = 0;     ///< waits are over, and the pull begins
  double pulled_s = 0;
  double computed_s = 0;
  double pushing_s = 0;  ///< the push, or the meeting, begins
  double pushed_s = 0;   ///< the rank continues with its next step
};

/// A pull or push of all values by a rank, at one moment.
struct ModeEvent {
  int rank = 0;
  std::int64_t step = 0;  ///< ModeStep::step
  bool is_push = false;
};

/// The steps of all ranks of a run.
struct ModeTimeline {
  std::vector<ModeStep> steps = {};  ///< sorted by the end of their push, and then by rank
  std::int64_t dropped = 0;          ///< gradients that came too late to count

  /// Returns the seconds until the last step has ended.
  double seconds() const { return steps.empty() ? 0.0 : steps.back().pushed_s; }
  /// Returns the pulls and pushes of asynchronous ranks in order. A pull or push counts at the middle of its time.
  std::vector<ModeEvent> events() const;
  /// Returns the age of each gradient of asynchronous ranks, in the order of pushes: how many pushes of other ranks
  /// came between its pull and its push.
  std::vector<std::int64_t> ages() const;
};

/// A run of `steps` synchronous steps, or of as many gradients as these steps have. In the second case, a rank that
/// begins a step takes the next of these gradients.
struct ModeRun {
  ModeRule rule;
  ModeCosts costs;
  int ranks = 1;
  std::int64_t steps = 1;
};

/// Plays a run. `compute_s`: the seconds of forward and backward of a rank's step; steps count from 1. The function is
/// an event simulation without units and shards, in which a step has only the times of ModeStep.
/// benchmarks/push_orders.py has the same model without fragments. tests/planner/mode_cases.json has runs on which both
/// programs agree. The cost is one event for each step of a rank, and each event costs the logarithm of the number of
/// ranks.
///
/// If there is a `delay`, the run begins as each later period of `every` steps does: the sum of the last fragment
/// begins with the period.
ModeTimeline play_mode(const ModeRun& run, const std::function<double(int rank, std::int64_t step)>& compute_s);

}  // namespace tessera
