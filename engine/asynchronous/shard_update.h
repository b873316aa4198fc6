#pragma once

#include <cstdint>
#include <vector>

#include "engine/asynchronous/common_parameters.h"
#include "engine/step/rules/element_update.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// A shard, and what a rank pushes to it.
struct PushedShard {
  const FlatGroup& view;          ///< the shard's values and states, and the rank's gradients
  std::int64_t* counts;           ///< [parameter of the group]: number of updates so far
  float* mean_squares = nullptr;  ///< [element of the shard]: mean of its squared gradients; null unless lambda is
                                  ///< adaptive
  const float* pulled = nullptr;  ///< [element of the shard]: values with which the gradients were made
};

/// Applies a rank's gradients to a shard, with the corrections for age and delay that "sync" names. Whoever holds the
/// shard's lock calls it: a rank (OwnedShards) or a server (ServedJob). One thread at a time uses a ShardUpdate.
class ShardUpdate {
 public:
  /// Keeps a reference to `config`.
  explicit ShardUpdate(const AsynchronousConfig& config) : config_(config) {}

  /// Applies the gradients of `shard.view`, which it may overwrite, and counts the update. `group`: the group with the
  /// layout and the parameters. `with.used` is about this group's parameters. `pulled` is read if the configuration has
  /// a lambda.
  void apply(const FlatGroup& group, const PushedShard& shard, const ElementUpdate& rule, const PushRates& with,
             std::int64_t age);

 private:
  float compensated(const PushedShard& shard, Extent run, float scale) const;

  const AsynchronousConfig& config_;
  std::vector<UpdateRun> runs_;
};

}  // namespace tessera
