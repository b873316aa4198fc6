#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/asynchronous/common_parameters.h"
#include "engine/asynchronous/shard_rule.h"
#include "engine/step/rules/group_norms.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// A shard, and the gradients that a rank pushes to it.
struct PushedShard {
  /// the shard's values and states, and the rank's gradients. There are several parts, in the order of elements, where
  /// a shard is a whole group whose memory is cut over all ranks
  std::span<const FlatGroup> parts;
  std::int64_t* counts;  ///< [parameter of the group]: number of updates so far
  /// [part][element of the part]: means of its squared gradients; empty unless lambda is adaptive
  std::span<float* const> mean_squares = {};
  const float* pulled = nullptr;  ///< [element of the shard]: values with which the gradients were made
  GroupNorms* norms = nullptr;    ///< the group's; null unless the rule is lamb or lars
  std::span<float> work = {};     ///< scratch (work_where_it_lies); begins on a cache line
};

/// Applies a rank's gradients to a shard, with the corrections for age and delay that "sync" names. The holder of the
/// shard's lock calls it: a rank (OwnedShards) or a server (ServedJob). One thread at a time uses a ShardUpdate.
///
/// Under a rule of single elements, a shard may be any part of a group. Other rules need whole tensors, so the shard is
/// then the whole group:
///
/// | rule                 | passes over the group                                                               |
/// |----------------------|-------------------------------------------------------------------------------------|
/// | of single elements   | one                                                                                 |
/// | lamb, lars           | one for the norms of each parameter, and one that updates it (LayerwiseRule)        |
/// | muon                 | momenta and directions; each matrix is made orthogonal; a step                      |
/// | of whole tensors     | each tensor is updated where it lies, or in `work` if it lies in several parts      |
class ShardUpdate {
 public:
  /// Keeps a reference to `config`.
  explicit ShardUpdate(const AsynchronousConfig& config) : config_(config) {}

  /// Applies the gradients of `shard`, which it may overwrite, and counts the update. `group`: the group with the
  /// layout and the parameters. `with.used` has one entry for each parameter of this group. `pulled` is read if the
  /// lambda of the delay compensation is not 0. If a program's rule throws, the shard may be half-updated.
  void apply(const FlatGroup& group, const PushedShard& shard, const ShardRule& rule, const PushRates& with,
             std::int64_t age);

 private:
  /// The arguments of `apply`.
  struct Push {
    const FlatGroup& group;
    const PushedShard& shard;
    const ShardRule& rule;
    UpdateRates rates;  ///< gradient_scale is for gradients that are compensated already
    float scale;        ///< the factor by which compensation multiplies gradients
    std::span<const char> used;
  };

  template <class Body>
  void for_pieces(const Push& push, const Body& body) const;
  void compensate_piece(const Push& push, std::size_t part, Extent run) const;
  void update_elements(const Push& push) const;
  void update_layers(const Push& push) const;
  void update_matrices(const Push& push) const;
  void update_matrix(const Push& push, std::size_t i) const;

  const AsynchronousConfig& config_;
  std::vector<UpdateRun> runs_;
};

}  // namespace tessera
