#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/memory/frozen_states.h"
#include "engine/memory/joined_state.h"
#include "engine/memory/training_memory.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/unit.h"

namespace tessera {

/// Optimizer states on their way from one layout of the same module to another, on the same ranks: what an Engine has when
/// it plans anew (Engine::set_trainable).
class CarriedStates {
 public:
  /// StepProgress::updates.
  using Updates = std::map<const c10::TensorImpl*, std::int64_t>;

  /// Of the trainable parameters of `units`, on a rank that is at `mesh` among all. Shares the memory that holds them.
  CarriedStates(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshPosition& mesh,
                const TrainingMemory& memory, const MeshAxes& axes);

  /// Writes this rank's parts of them into `units`, by their names. What trains there and had no such state begins anew, with zeros and
  /// without `updates`. What trains no longer goes to `frozen`, if `updates` says that some step updated it. Each state is joined from all
  /// ranks' parts, one group at a time. `name_of`: of groups before and now. REQUIRES: the same formats of states, and the same mesh.
  /// Collective over `control`.
  void write_to(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, NameOfState name_of,
                FrozenStates& frozen, Updates& updates) const;

 private:
  /// `count(parameter)`: it has got a state.
  void write_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control, FrozenStates& frozen,
                           const Updates& updates, c10::function_ref<void(const c10::TensorImpl*)> count) const;
  /// A state of a whole group.
  JoinedState join(const FlatGroup& group, std::size_t state, Collectives& control) const;

  std::shared_ptr<Collectives> transport_;  ///< the memory came from it, and goes before it
  Arena memory_;
  std::vector<FlatGroup> groups_;  ///< their parts and memory; without unit and storage
  AxisPlacement placement_;
  MeshPosition mesh_;
};

}  // namespace tessera
