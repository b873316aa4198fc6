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

/// Lists the optimizer states that an Engine keeps for trainable parameters: of each element, and of whole tensors
/// (GroupShape::tensor_states). Checkpoints use this list to name states.
class StoredStates {
 public:
  StoredStates(const Strategy& strategy, const OwnRules& own_rules, const std::vector<std::unique_ptr<Unit>>& units);

  /// Returns the states of all groups; the list has each name once.
  const std::vector<SavedState>& all() const { return all_; }
  /// Returns the states that one group keeps of each element, as indices into all(): StateView::state[i] is
  /// all()[of(group)[i]].
  std::span<const std::size_t> of(const FlatGroup& group) const {
    return group.matrices.empty() ? of_elements_ : of_matrices_;
  }
  /// Returns the name of state number `state` of `group`.
  const std::string& name_in(const FlatGroup& group, std::size_t state) const { return all_[of(group)[state]].name; }
  /// Returns whether the optimizer may keep states of whole tensors, also for parameters that are frozen now.
  bool has_tensor_states() const { return has_tensor_states_; }
  /// Returns the index of a tensor state in all().
  std::size_t place_of(const TensorState& state) const;
  /// Returns the names of a parameter's states, for SavedParameter::states; nothing if the parameter has all states.
  std::optional<std::vector<std::string>> names_of(const FlatGroup& group, std::size_t parameter) const;

 private:
  std::vector<std::size_t> add(const Optimizer& optimizer);
  std::size_t add(const std::string& name, StateDType dtype);

  std::vector<SavedState> all_;
  std::vector<std::size_t> of_elements_, of_matrices_;
  bool has_tensor_states_ = false;
};

/// Returns the bytes that state `index` of a run of `numel` elements of `group` needs.
StateBytes bytes_of_state(const FlatGroup& group, std::size_t index, std::int64_t numel);

}  // namespace tessera
