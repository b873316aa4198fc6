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
#include "tessera/own_rules.h"

namespace tessera {

/// The states that an Engine keeps of what trains: of each element, and of whole tensors (FlatGroup::tensor_states).
class StoredStates {
 public:
  StoredStates(const Strategy& strategy, const OwnRules& own_rules, const std::vector<std::unique_ptr<Unit>>& units);

  /// Of all groups, each name once.
  const std::vector<SavedState>& all() const { return all_; }
  /// Those of each element of one group: StateView::state[i] is all()[of(group)[i]].
  std::span<const std::size_t> of(const FlatGroup& group) const {
    return group.matrices.empty() ? of_elements_ : of_matrices_;
  }
  /// The name of state number `state` of those.
  const std::string& name_in(const FlatGroup& group, std::size_t state) const { return all_[of(group)[state]].name; }
  /// Whether there may be states of whole tensors, of what is frozen now, too.
  bool has_tensor_states() const { return has_tensor_states_; }
  /// Of a tensor state; its place in all().
  std::size_t place_of(const TensorState& state) const;
  /// Names of all that a parameter has, for SavedParameter::states: nothing where it has all there are.
  std::optional<std::vector<std::string>> names_of(const FlatGroup& group, std::size_t parameter) const;

 private:
  std::vector<std::size_t> add(const Optimizer& optimizer);
  std::size_t add(const std::string& name, StateDType dtype);

  std::vector<SavedState> all_;
  std::vector<std::size_t> of_elements_, of_matrices_;
  bool has_tensor_states_ = false;
};

/// Bytes that state `index` of a run of elements needs.
StateBytes bytes_of_state(const FlatGroup& group, std::size_t index, std::int64_t numel);

}  // namespace tessera
