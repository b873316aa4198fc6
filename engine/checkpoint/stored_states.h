#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "optim/optimizer.h"
#include "sharding/unit.h"
#include "tessera/elementwise_optimizer.h"

namespace tessera {

/// The states that an Engine keeps of each element of what trains.
class StoredStates {
 public:
  /// `own_rule`: the program's, or null.
  StoredStates(const Strategy& strategy, const std::shared_ptr<const ElementwiseOptimizer>& own_rule);

  /// Of all groups, each name once.
  const std::vector<SavedState>& all() const { return all_; }
  /// Those of one group: StateView::state[i] is all()[of(group)[i]].
  std::span<const std::size_t> of(const FlatGroup& group) const {
    return group.matrices.empty() ? of_elements_ : of_matrices_;
  }
  /// Their names, for SavedParameter::states: nothing where the group has all there are.
  std::optional<std::vector<std::string>> names_of(const FlatGroup& group) const;

 private:
  std::vector<std::size_t> add(const Optimizer& optimizer);

  std::vector<SavedState> all_;
  std::vector<std::size_t> of_elements_, of_matrices_;
};

/// Bytes that state `index` of a run of elements needs.
StateBytes bytes_of_state(const FlatGroup& group, std::size_t index, std::int64_t numel);

}  // namespace tessera
