#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/memory/frozen_states.h"
#include "engine/memory/state_views.h"
#include "engine/memory/training_memory.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/unit.h"

namespace tessera {

/// Moves optimizer states from one layout of a module to another, on the same ranks. An Engine makes one when it plans
/// anew (Engine::set_trainable): from the old units, before their memory is freed; then `write_to` writes the states to
/// the new units.
class CarriedStates {
 public:
  /// The number of steps in which each parameter took part: StepProgress::updates.
  using Updates = std::map<const c10::TensorImpl*, std::int64_t>;

  /// Takes the states of the trainable parameters of `units`. `mesh`: this rank's position among all ranks. It shares
  /// the memory that holds the states, so that this memory stays.
  CarriedStates(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshPosition& mesh,
                const TrainingMemory& memory, const MeshAxes& axes);

  /// Writes this rank's parts of the states into `units`, which it finds by their names. Each state is joined from all
  /// ranks' parts first, one group at a time.
  /// - A parameter that trains in `units` and lacked one of its states begins anew: its states are zeros, and its
  /// `updates` are erased.
  /// - A parameter that trains no longer goes to `frozen`, if `updates` says that some step updated it.
  /// `name_of` names the states of the old groups and of the new ones. REQUIRES: the same formats of states, and the
  /// same mesh. It is collective over `control`. Throws the tessera::Errors of the group, and of reading records.
  void write_to(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, NameOfState name_of,
                FrozenStates& frozen, Updates& updates) const;

 private:
  /// Calls `count(parameter)` whenever it gives a parameter one of its states.
  void write_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, FrozenStates& frozen,
                           const Updates& updates, c10::function_ref<void(const c10::TensorImpl*)> count) const;
  /// Joins one state of a whole group from all ranks' parts.
  JoinedState join(const FlatGroup& group, std::size_t state, Collectives& control) const;

  std::shared_ptr<Collectives> transport_;  ///< this allocated the memory, and must be destroyed after the memory
  Arena memory_;
  std::vector<FlatGroup> groups_;  ///< the groups' parts and memory, without unit and storage
  AxisPlacement placement_;
  MeshPosition mesh_;
};

}  // namespace tessera
