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

/// Moves optimizer states from one layout of a module to another, on the same ranks. When an Engine plans anew
/// (Engine::set_trainable), it makes a CarriedStates from the old units, before their memory is freed. Then `write_to`
/// writes the states to the new units.
class CarriedStates {
 public:
  /// The number of steps in which each parameter took part: StepProgress::updates.
  using Updates = std::map<const c10::TensorImpl*, std::int64_t>;

  /// Takes the states of the trainable parameters of `units`. `mesh`: this rank's position among all ranks. This object
  /// shares the memory of the states, so that the memory is not freed.
  CarriedStates(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshPosition& mesh,
                const TrainingMemory& memory, const MeshAxes& axes);

  /// Writes this rank's parts of the states into `units`. Parameters are the same tensors in the old and new units.
  /// Each state is first joined from the parts of all ranks, one group at a time.
  /// - A parameter that trains in `units` and lacked one of its states begins anew: missing states stay zeros, and its
  /// `updates` are erased.
  /// - The states of a parameter that no longer trains go to `frozen`, if `updates` says that some step updated the
  ///   parameter.
  /// `name_of` names the states of the old and of the new groups. REQUIRES: the same formats of states, and the
  /// same mesh. It is collective over `control`. Throws the tessera::Errors of the group, and of reading records.
  void write_to(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, NameOfState name_of,
                FrozenStates& frozen, Updates& updates) const;

 private:
  /// It calls `count(parameter)` each time it writes a state of a parameter.
  void write_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, FrozenStates& frozen,
                           const Updates& updates, c10::function_ref<void(const c10::TensorImpl*)> count) const;
  /// Joins one state of a whole group from all ranks' parts.
  JoinedState join(const FlatGroup& group, std::size_t state, Collectives& control) const;

  std::shared_ptr<Collectives> transport_;  ///< allocated the memory, and must be destroyed after it
  Arena memory_;
  std::vector<FlatGroup> groups_;  ///< the parts and memory of the old groups, without units and storages
  AxisPlacement placement_;
  MeshPosition mesh_;
};

}  // namespace tessera
