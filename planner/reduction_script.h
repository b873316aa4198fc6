#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "planner/script_writer.h"

namespace tessera {

/// Where a step starts sums, does its share of them and waits for them: what Reducer does, with times left out.
///
/// A sum is made in one of three ways (the group's Links say in which):
///
/// * In the background: when it is started its call begins, and goes on by itself. At the plan's `end_lag` the rank
///   waits for its end.
/// * In shared memory: when it is started the rank says that its gradients are there. At `reduction_lag` it waits until
///   all have said so, and does its share of the sum. At `end_lag` it waits until all have done theirs.
/// * In the call (a user's own backend): when it is started the rank waits for its end.
///
/// The sum over the replicate axis follows that over the shard axis: at the lag, to be made in the background, where
/// the plan has a lag; else at the end, and the rank waits.
class ReductionScript {
 public:
  /// A unit's gradients are summed, and it is updated before backward goes on (optimizer.in_backward).
  using OnSummed = std::function<void(int unit)>;

  /// All outlive this.
  ReductionScript(const MemoryPlan& plan, ScriptWriter& writer, OnSummed on_summed)
      : plan_(plan), writer_(writer), on_summed_(std::move(on_summed)), is_reduced_(plan.input().units.size(), 0) {}

  /// The unit has all its gradients of this round.
  void complete(int unit);
  /// A round's backward has ended. Units without gradients take part with zeros.
  void finish(bool is_last_round);

 private:
  enum class Way : std::uint8_t { kBackground, kSharedMemory, kInCall };
  struct Sum {
    Axis axis = Axis::kShard;
    CallCost cost;
    int unit = 0;
    int started = ScriptWriter::kNoCall;   ///< the call, or where ranks say that their gradients are there
    int finished = ScriptWriter::kNoCall;  ///< in shared memory: where they say that their shares are done
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
  std::vector<char> is_reduced_;  ///< [unit]: this round
  std::vector<UnitSums> sums_;    ///< of the step, in the order in which they were started
  std::int64_t advanced_ = 0, over_ = 0;
};

}  // namespace tessera
