#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planner/script_writer.h"

namespace tessera {

/// Writes into a script where a rank starts sums, does its share of each sum and waits for them, in the same order as
/// Reducer.
///
/// A sum is made in one of three ways (the group's Links say in which):
///
/// * In the background: the call begins when the sum is started, and proceeds by itself. The rank waits for its end at
///   the plan's `end_lag`.
/// * In shared memory: the rank announces at the start of a sum that its gradients are ready. At `reduction_lag` the
///   rank waits for the announcements of all ranks, and does its share of the sum. At `end_lag` the rank waits until
///   all ranks have done their shares.
/// * In the call (a user's own backend): the rank starts the call and at once waits for its end.
///
/// The sum over the replicate axis follows the one over the shard axis. If the plan has an `end_lag`, or if sums are
/// queued on a GPU, this sum is started at `reduction_lag`, in the background. Otherwise it is made at the end, and the
/// rank waits for it.
class ReductionScript {
 public:
  /// It is called when a unit's gradients are summed, and updates the unit before backward goes on
  /// (optimizer.in_backward).
  using OnSummed = std::function<void(int unit)>;

  /// Makes a writer of sums. All arguments must outlive this object.
  ReductionScript(const MemoryPlan& plan, ScriptWriter& writer, OnSummed on_summed)
      : plan_(plan), writer_(writer), on_summed_(std::move(on_summed)), is_reduced_(plan.units().size(), 0) {}

  /// This is called when this round has made all gradients of the unit.
  void complete(int unit);
  /// This is called when a round's backward has ended. Units without gradients take part with zeros.
  void finish(bool is_last_round);

 private:
  enum class Way : std::uint8_t { kBackground, kSharedMemory, kInCall };
  struct Sum {
    Axis axis = Axis::kShard;
    CallCost cost;
    int unit = 0;
    /// The call, or the barrier at which ranks announce that their gradients are ready.
    int started = ScriptWriter::kNoCall;
    /// Only in shared memory: the barrier at which ranks announce that their shares are done.
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
  std::vector<UnitSums> sums_;    ///< sums of the step, ordered by their starts
  std::int64_t advanced_ = 0, over_ = 0;
};

}  // namespace tessera
