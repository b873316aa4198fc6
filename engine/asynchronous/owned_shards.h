#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/asynchronous/peer_board.h"
#include "engine/asynchronous/push_order.h"
#include "engine/step/rules/element_update.h"
#include "runtime/base/metrics/latency_histogram.h"
#include "sharding/arena.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// How old the gradients of a step were: for each shard that was pushed, the updates by other ranks since this rank
/// pulled it.
struct GradientAges {
  double mean() const { return shards > 0 ? static_cast<double>(sum) / static_cast<double>(shards) : 0.0; }
  std::int64_t sum = 0, most = 0, shards = 0;
};

/// What a push applies its gradients with.
struct PushRates {
  UpdateRates rates;           ///< gradient_scale: without what age does
  std::span<const char> used;  ///< [trainable parameter, in unit, group, layout order]: has a gradient of this rank
};

/// The parameters that asynchronous ranks train together: fp32 values and optimizer states, cut over the ranks as
/// SHARD_OPTIMIZER cuts them. Rank q owns the q-th part of each flat group: the part counts in its plan, and a
/// checkpoint gets it from there. All parts lie in memory that all ranks map, so whoever pushes a gradient does the
/// owner's work itself, in the owner's memory: it applies the rule while it holds the shard's lock. A rank that
/// computes, or is stopped while it does, holds nobody up. Nothing is sent, and gradients are read where backward left
/// them.
///
/// | memory                                     | whose                | changed by                        |
/// |--------------------------------------------|----------------------|-----------------------------------|
/// | shards: values, states, version, counts    | all ranks'           | `push`, under the shard's lock    |
/// | FlatGroup::full, what this rank pulled     | this rank's          | `pull`, at most once a step       |
/// | FlatGroup::gradient                        | this rank's          | backward; `push` compensates it   |
///
/// Invariants:
///  1. Who holds a shard's lock computes nothing else, waits for nothing, and holds no other one. Turns (max_staleness
///     0, play_order) are waited for before.
///  2. A pull has one version of a shard, and a shard has the updates of whole pushes: nothing is torn. Shards of one
///     unit may have different versions.
///  3. A step uses one version of each unit: what forward pulled is there in backward, in all of its microbatches.
///
/// The thread that trains calls all of it. Throws tessera::Error: 75 where a rank that is waited for ends, or holds
/// a shard for comm.timeout_s, or was killed while it held one; 64 where a program leaves the order that it plays.
class OwnedShards {
 public:
  /// Makes the shards, zeros, and points each group's states at this rank's own. Refers to the first three. Collective.
  OwnedShards(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, PeerBoard& board);

  /// What this rank has of shared memory: MemoryCategory::kOptimizer.
  std::int64_t memory_bytes() const { return memory_.bytes(); }
  PeerBoard& board() { return board_; }

  /// Makes the newest values of a unit this rank's own, unless this step has pulled them already. A rank that is
  /// max_staleness steps ahead waits first. Returns false where there was nothing to do.
  bool pull(const Unit& unit);
  /// Applies this rank's gradients of all units, and ends its step. With max_staleness 0 it waits until all ranks have
  /// computed, and for its turn.
  GradientAges push(const ElementUpdate& rule, const PushRates& with);
  /// Ends this rank's step without a push.
  void skip();

  /// Makes this rank's parameters, the same on all ranks or right in its own part at least, everybody's. Collective.
  void adopt();
  /// Makes the newest values everybody's own. Returns once all ranks have them. Collective.
  void bring_together();

  /// Units pulled so far, and their bytes.
  std::int64_t pulls() const { return pulls_; }
  std::int64_t pulled_bytes() const { return pulled_bytes_; }
  /// Seconds so far in pulls, waits for slow ranks and turns included, and those in which pushes waited for these.
  double pull_seconds() const { return pull_seconds_; }
  double push_wait_seconds() const { return push_wait_seconds_; }
  /// Counts, from now on, how long each unit's pulls take. `latencies` [unit] must outlive this.
  void time_pulls(std::span<LatencyHistogram> latencies) { latencies_ = latencies; }

  /// How often each parameter of a group was updated, at this rank's own shard. REQUIRES: no rank pushes.
  std::span<std::int64_t> counts(const FlatGroup& group);

 private:
  struct Shard;   // in memory that ranks share
  class Holding;  // a shard's lock
  struct Group {
    FlatGroup* flat = nullptr;
    std::vector<FlatGroup> views;      ///< [owner]: with the owner's values and states, and this rank's gradients
    std::vector<std::int64_t> pulled;  ///< [owner]: the version
    std::size_t first_shard = 0;       ///< shards are numbered by group, then owner
    std::size_t first_parameter = 0;   ///< among all trainable ones
    std::int64_t* counts = nullptr;    ///< [owner][parameter]
  };

  void place(FlatGroup& group, const MemoryPlan& plan);
  void read_turns();
  Shard& shard(const Group& group, int owner) const;
  std::span<std::int64_t> counts_at(const Group& group, int owner) const;
  std::int64_t step() const { return board_.pushed(board_.rank()) + 1; }
  void wait_for_the_slowest(const Unit& unit);
  void wait_for_turn_of_round();
  void await_turn(const Group& group, int owner, bool is_push);
  void pull_shard(Group& group, int owner);
  void push_shard(Group& group, int owner, const ElementUpdate& rule, const PushRates& with, GradientAges& ages);
  float compensated(const Group& group, int owner, Extent run, float scale) const;
  void note(const Group& group, int owner, bool is_push, std::int64_t version);
  void end_step();
  std::string what(const Group& group, int owner, const char* operation) const;

  const AsynchronousConfig& config_;
  PeerBoard& board_;
  Arena memory_;   ///< this rank's part of values and states
  Arena control_;  ///< Shards, then counts
  std::vector<Group> groups_;
  std::vector<std::size_t> first_group_;       ///< [unit]: among groups_; one more for the end
  std::vector<char> is_fresh_;                 ///< [unit]: pulled in this step
  std::vector<ShardName> names_;               ///< [shard]
  std::vector<std::vector<ShardTurn>> turns_;  ///< [shard]; empty where no order is played
  std::vector<std::size_t> own_turns_end_;     ///< [shard]: behind this rank's last turn
  std::optional<OrderWriter> writer_;
  std::vector<UpdateRun> runs_;
  std::int64_t pulls_ = 0, pulled_bytes_ = 0;
  double pull_seconds_ = 0, push_wait_seconds_ = 0;
  std::span<LatencyHistogram> latencies_;  ///< empty: pulls are not timed
};

}  // namespace tessera
