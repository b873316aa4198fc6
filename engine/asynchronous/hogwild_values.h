#pragma once

// See docs/glossary.md: unit.

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/asynchronous/common_parameters.h"
#include "engine/step/rules/element_update.h"
#include "runtime/base/state_dtype.h"
#include "sharding/arena.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// The only copy of the parameters. All ranks of a host read it in forward and backward, and each rank updates it
/// whenever the rank has gradients: Hogwild! (arXiv 1106.5730). No rank waits for another rank or takes a lock.
///
/// | memory                                  | whose                 | read by           | written by               |
/// |-----------------------------------------|-----------------------|-------------------|--------------------------|
/// | FlatGroup::full, all values             | all ranks'            | whoever computes  | `push` (merge_words)     |
/// | states, StateSharing::kShared           | all ranks'            | `push`            | `push` (write_words)     |
/// | states and counts, StateSharing::kOwn   | each has all of them  | `push`            | that rank's `push`       |
/// | counts of updates, StateSharing::kShared| one set for each part | `push`            | `push`, counted atomically |
///
/// A push takes one block of elements after another. It copies the block's values, lets the rule update the copy, and
/// merges the changes into the common values. So an update by another rank is lost only if it falls between the load
/// and the store of one number. With one rank, values have the same bits as in plain training. Shared states are copied
/// back. If two ranks update one state at the same time, the later update stays.
///
/// Some rules (sgd without momentum, adagrad; no weight decay) do not change an element that has no gradient. Such a
/// rule does not write the element. In an embedding, it changes only the rows that a batch has used.
class HogwildValues final : public PushedParameters {
 public:
  /// Makes the states, which are zeros, and points each group's states at the states of this rank. It keeps references
  /// to all arguments. It is collective. REQUIRES: units have their first values, in memory that all ranks of `board`
  /// map.
  HogwildValues(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, PeerBoard& board);

  /// Returns the bytes of this rank's states, or of its part of the shared states.
  std::int64_t memory_bytes() const override { return memory_.bytes(); }
  /// The age is the number of steps that other ranks have made since this rank's last step.
  GradientAges push(const ShardRule& rule, const PushRates& with) override;
  void skip() override;
  /// All ranks have the values already. If each rank has its own states, it copies each other rank's part of the states
  /// from that rank.
  void adopt() override;
  /// If each rank has states of its own, replaces the states of a parameter by their mean over the ranks that have
  /// updated the parameter. The parameter's count of updates becomes the largest count of any rank.
  void bring_together() override;
  std::span<std::int64_t> counts(const FlatGroup& group) override;
  double communication_seconds() const override { return 0; }

 private:
  static constexpr std::int64_t kBlock = 1024;  ///< number of elements that are updated together; they fit in a core's
                                                ///< cache
  using Block = std::array<float, kBlock>;

  /// Elements of a group whose states lie together.
  struct Piece {
    FlatGroup view;                  ///< with this rank's gradients, and the common values
    std::int64_t* counts = nullptr;  ///< [parameter]: number of its updates so far
  };
  struct Group {
    FlatGroup* flat = nullptr;
    std::vector<Piece> pieces;  ///< [owner] if states are shared; otherwise one piece
    std::size_t first_parameter = 0;
  };

  bool has_own_states() const { return sharing_ == StateSharing::kOwn; }
  void place(Group& group, const MemoryPlan& plan);
  void update(const Group& group, const Piece& piece, const ElementUpdate& rule, const PushRates& with);
  void update_block(const FlatGroup& view, const ElementUpdate& rule, const UpdateRates& rates, const UpdateRun& block);
  void average_own_part(const Group& group);
  void take_parts_of_others();
  void take_counts();
  float* state_of(const Group& group, std::size_t state, int rank) const;
  std::int64_t steps_of_others() const;
  void end_step();

  const StateSharing sharing_;
  const MeshPosition mesh_;
  Arena memory_;   ///< states
  Arena control_;  ///< counts: [rank][trainable parameter]
  std::vector<Group> groups_;
  std::size_t parameters_ = 0;   ///< number of trainable parameters
  std::int64_t seen_ = 0;        ///< steps of other ranks when this rank's last step ended
  std::vector<UpdateRun> runs_;  ///< scratch of `update`; the members below are also scratch
  std::vector<std::int64_t> before_counts_;
  Block before_{}, after_{};
  std::array<Block, kMostStates> states_before_{}, states_after_{};
};

}  // namespace tessera
