#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planner/script/script_writer.h"

namespace tessera {

/// Writes the reductions of a step into a script: where a rank starts sums, computes its share of each sum, and waits
/// for sums. The order is that of Reducer.
///
/// A sum is computed in one of three ways, which depend on the group's Links:
///
/// * In the background: the call begins when the sum is started, and proceeds while the rank computes. The rank waits
///   for its end at the plan's `end_lag`.
/// * In shared memory: at the start of a sum the rank announces that its gradients are ready. At `reduction_lag` the
///   rank waits for the announcements of all ranks, and computes its share of the sum. At `end_lag` the rank waits
///   until all ranks have computed their shares.
/// * In the call (a user's own backend): the rank starts the call and at once waits for its end.
///
/// The sum over the replicate axis follows that over the shard axis. If the plan has an `end_lag`, or if sums are
/// queued on a GPU, the sum over the replicate axis is started at `reduction_lag`, in the background. Otherwise it is
/// computed at the end, and the rank waits for it.
class ReductionScript {
 public:
  /// A function that updates a unit in backward (optimizer.in_backward). It is called when the unit's gradients are
  /// summed.
  using OnSummed = std::function<void(int unit)>;

  /// Makes a writer of sums. All arguments must outlive this object.
  ReductionScript(const MemoryPlan& plan, ScriptWriter& writer, OnSummed on_summed)
      : plan_(plan), writer_(writer), on_summed_(std::move(on_summed)), is_reduced_(plan.units().size(), 0) {}

  /// Reduces a unit, unless its gradients are accumulated. It is called when all gradients of the unit in this round
  /// are complete.
  void complete(int unit);
  /// Ends a round. It reduces the units that are not reduced yet, except in a round that only accumulates gradients,
  /// and waits for all sums. It is called when the round's backward has ended. Units without gradients are reduced with
  /// zeros.
  void finish(bool is_last_round);

 private:
  enum class Way : std::uint8_t { kBackground, kSharedMemory, kInCall };
  struct Sum {
    Axis axis = Axis::kShard;
    CallCost cost;
    int unit = 0;
    /// The number of the call, or of the barrier at which ranks announce that their gradients are ready.
    int started = ScriptWriter::kNoCall;
    /// The number of the barrier at which ranks announce that they have computed their shares; only in shared memory.
    int finished = ScriptWriter::kNoCall;
  };
  struct GroupSums {
    const GroupShape* group = nullptr;
    std::optional<Sum> shard, replicate;
  };
  struct UnitSums {
    int unit = 0;
    std::vector<GroupSums> groups;
    std::optional<Sum> notes;
  };

  Way way_of(Axis axis) const;
  Sum start(Axis axis, const CallCost& cost, int unit);
  void do_share(Sum& sum);
  void wait(Sum& sum);

  bool accumulates() const;
  bool replicas_follow() const;
  void reduce(int unit);
  void start_unit(int unit);
  void follow(std::int64_t lag, std::int64_t end_lag);
  void advance(UnitSums& unit);
  void end(UnitSums& unit);
  Sum start_replicas(const GroupSums& sums, int unit);

  const MemoryPlan& plan_;
  ScriptWriter& writer_;
  const OnSummed on_summed_;
  std::vector<char> is_reduced_;  ///< [unit]: whether it was reduced in this round
  std::vector<UnitSums> sums_;    ///< sums of the step, in the order in which they are started
  std::int64_t advanced_ = 0, over_ = 0;
};

}  // namespace tessera
