#pragma once

// See docs/glossary.md: flat group, unit.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/asynchronous/pulled_parameters.h"
#include "engine/asynchronous/shard_update.h"
#include "sharding/arena.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// The parameters that asynchronous ranks train together: fp32 values and optimizer states, cut over the ranks as
/// SHARD_OPTIMIZER cuts them. Rank q owns the q-th part of each flat group: the part is in rank q's plan, and rank q
/// writes it to checkpoints. All parts lie in memory that all ranks map. So the rank that pushes a gradient applies the
/// rule itself, in the owner's memory, while it holds the shard's lock. A rank that computes, or is stopped while it
/// computes, delays no other rank, unless max_staleness is set. Nothing is sent, and gradients are read where backward
/// left them.
///
/// A shard is a part of a group, with one owner. If the rule needs norms of parameters or whole tensors
/// (MemoryPlan::has_whole_shard), the shard is the whole group. The group's memory is still cut over all ranks, but the
/// group has one lock, one version, and one count of updates for each parameter.
///
/// | memory                                     | whose                | changed by                        |
/// |--------------------------------------------|----------------------|-----------------------------------|
/// | shards: values, states, version, counts    | all ranks'           | `push`, under the shard's lock    |
/// | HostCopies, pulled values                  | this rank's          | `pull`, at most once a step       |
/// | HostCopies, gradients                      | this rank's          | backward; `push` compensates them |
///
/// Invariants:
///  1. The holder of a shard's lock computes nothing but an update of the shard, waits for nothing, and holds no other
///     lock. A rank waits for its turn (max_staleness 0, play_order) before it takes the lock.
///  2. A pull copies one version of a shard, and a shard has the updates of whole pushes. So no rank sees a part of an
///     update. Shards of one unit may have different versions.
///  3. A step uses one version of each unit: backward finds the values that forward pulled, in all microbatches.
///
/// The thread that trains calls all functions. They throw tessera::Error: 75 if a rank for which this rank waits ends,
/// or holds a shard for comm.timeout_s, or was killed while it held a shard; 64 if a program leaves the recorded order
/// that it replays.
class OwnedShards final : public PulledParameters {
 public:
  /// Makes the shards, which are zeros, and points each group's states at the states of this rank's shards. Keeps
  /// references to the arguments. It is collective.
  OwnedShards(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, PeerBoard& board,
              HostCopies& copies);

  /// Returns the bytes of the values and states of this rank's shards.
  std::int64_t memory_bytes() const override { return memory_.bytes(); }
  std::int64_t scratch_bytes() const override { return work_.bytes(); }

  /// If max_staleness is 0, this waits until all ranks have computed and this rank's turn has come.
  GradientAges push(const ShardRule& rule, const PushRates& with) override;
  void skip() override;
  /// Applies the gradients that lie in this rank's memory to all shards of `owner`. They are this rank's own gradients,
  /// or a sum of the gradients of several ranks (FirstGradients). The function neither waits for a turn nor ends a
  /// step. REQUIRES: the rule needs no whole groups.
  void apply(int owner, const ShardRule& rule, const PushRates& with);
  /// Ends this rank's step: the next step pulls units anew.
  void end_step() { end_step_of_copies(); }
  void adopt() override;
  /// Every rank pulls the newest values.
  void bring_together() override;
  /// It waits for no rank, except for a rank that holds a shard's lock.
  void take_newest() override;

  /// Returns the counts of updates of this rank's shard. If a shard is a whole group, the counts date from the last
  /// call of `bring_together`, and rank 0's counts are in effect after `share_counts`.
  std::span<std::int64_t> counts(const FlatGroup& group) override;
  void share_counts() override;

 private:
  struct Shard;   // a shard, in memory that ranks share
  class Holding;  // a shard's lock
  struct Group {
    FlatGroup* flat = nullptr;
    bool is_whole = false;             ///< whether the group is one shard
    std::vector<FlatGroup> views;      ///< [owner]: group with the owner's values and states, and with this rank's
                                       ///< gradients
    std::vector<std::int64_t> pulled;  ///< [shard of the group]: the version that was pulled
    /// [owner]: means of squared gradients; empty unless lambda is adaptive
    std::vector<float*> mean_squares = {};
    std::size_t first_shard = 0;                  ///< shards are numbered by group, then owner
    std::size_t first_parameter = 0;              ///< number of the group's first parameter among all trainable ones
    std::int64_t* counts = nullptr;               ///< [shard of the group][parameter]: number of updates so far
    std::vector<std::int64_t> known_counts = {};  ///< whole group: this rank's copy of `counts` (OwnedShards::counts)
    std::optional<GroupNorms> norms = {};         ///< set under lamb and lars
    int shards() const { return static_cast<int>(pulled.size()); }
    int part_count() const { return is_whole ? static_cast<int>(views.size()) : 1; }
  };

  void pull_unit(const Unit& unit) override;
  // In the functions below, `shard` is the number of a shard of the group: its owner, or 0 if the group is one shard.
  void place(FlatGroup& group, const MemoryPlan& plan);
  Shard& shard_at(const Group& group, int shard) const;
  std::span<std::int64_t> counts_at(const Group& group, int shard) const;
  std::span<const FlatGroup> parts_of(const Group& group, int shard) const;
  void wait_for_the_slowest(const Unit& unit);
  void wait_for_turn_of_round();
  void await_turn(const Group& group, int shard, bool is_push);
  void pull_group(Group& group, int first);
  void pull_shard(Group& group, int shard);
  void copy_shard(Group& group, int shard);
  void push_shard(Group& group, int shard, const ShardRule& rule, const PushRates& with, GradientAges& ages);
  void note(const Group& group, int shard, bool is_push, std::int64_t version);
  void update_runs(Group& group, int shard, const ShardRule& rule, const PushRates& with, std::int64_t age);
  std::string what(const Group& group, int shard, const char* operation) const;

  Arena memory_;   ///< this rank's part of values and states
  Arena control_;  ///< Shards, then counts
  Arena work_;     ///< OuterNumel::work
  std::vector<Group> groups_;
  ShardUpdate update_;
};

}  // namespace tessera
