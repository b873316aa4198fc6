#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace tessera {

/// Says when ranks wait for each other.
struct ModeRule {
  enum class Kind : std::uint8_t {
    kMeeting,       ///< ranks add up gradients or weights once in `every` steps, and each rank makes all steps
    kAsynchronous,  ///< a rank pushes its gradient as soon as it has one, and begins the next step
    kBackups,       ///< a step is over once all ranks but `spare` have come; ranks that come later drop their gradients
  };
  Kind kind = Kind::kMeeting;
  std::int64_t every = 1;                          ///< kMeeting: steps from one meeting to the next; of a fragment
  std::int64_t delay = 0;                          ///< kMeeting: steps that ranks make while a fragment is summed
  std::optional<std::int64_t> max_staleness = {};  ///< kAsynchronous: AsynchronousConfig::max_staleness
  std::int64_t spare = 0;                          ///< kBackups: SyncConfig::backups, below the number of ranks
};

/// The seconds of a fragment's meeting. A fragment is a part of the model that has meetings of its own
/// (SyncConfig::fragments).
struct FragmentCosts {
  double sum_s = 0;      ///< from the moment at which the last rank has come
  double publish_s = 0;  ///< from the moment at which a rank has the sum, until it continues
};

/// The seconds of a rank's step in addition to its compute.
struct ModeCosts {
  double pull_s = 0;
  double push_s = 0;  ///< seconds of a push; kMeeting: seconds at the end of a step without a meeting
  /// Seconds of a meeting, from the moment at which the last rank has come. With fragments: the seconds for which ranks
  /// that are alike wait in `every` steps.
  double meet_s = 0;
  /// kMeeting: the fragments, which have their turns one after the other, spread over `every` steps. If it is empty,
  /// the whole model is one fragment that takes `meet_s`. REQUIRES: `every` is at least the number of fragments times
  /// ModeRule::delay, and at least that number.
  std::vector<FragmentCosts> fragments = {};
};

/// A step of a rank whose gradient counts. Times are seconds from the start of the run.
struct ModeStep {
  int rank = 0;
  std::int64_t step = 0;  ///< number among the steps of this rank, from 1
  double begin_s = 0;     ///< waits are over, and the pull begins
  double pulled_s = 0;
  double computed_s = 0;
  double pushing_s = 0;  ///< the push, or the meeting, begins
  double pushed_s = 0;   ///< the rank continues with its next step
};

/// The steps of all ranks of a run.
struct ModeTimeline {
  std::vector<ModeStep> steps = {};  ///< sorted by the end of their push, and then by rank
  std::int64_t dropped = 0;          ///< gradients that came too late to count

  /// Returns the seconds until the last step has ended.
  double seconds() const { return steps.empty() ? 0.0 : steps.back().pushed_s; }
  /// Returns the age of each gradient of asynchronous ranks, in the order of pushes: how many pushes of others came
  /// between its pull and its push. Pull and push count at the middle of their time.
  std::vector<std::int64_t> ages() const;
};

/// A run: `steps` synchronous steps, or as many gradients as these have, which ranks take one after the other.
struct ModeRun {
  ModeRule rule;
  ModeCosts costs;
  int ranks = 1;
  std::int64_t steps = 1;
};

/// Plays a run. `compute_s`: the seconds of forward and backward of a rank's step, from 1. It is an event simulation in
/// which a step is four moments; it knows no units and no shards. benchmarks/push_orders.py has the same model but for
/// fragments, and makes that study's orders from it; tests/planner/mode_cases.json has runs on which both agree. Costs:
/// an event a step of a rank, each the logarithm of the number of ranks.
///
/// A run with a `delay` begins as each later period of `every` steps does: the last fragment's sum begins with it.
ModeTimeline play_mode(const ModeRun& run, const std::function<double(int rank, std::int64_t step)>& compute_s);

}  // namespace tessera
