#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/memory/training_memory.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/unit.h"

namespace tessera {

/// Optimizer states on their way from one layout of the same module to another, on the same ranks: what an Engine has when
/// it plans anew (Engine::set_trainable).
class CarriedStates {
 public:
  /// Of the trainable parameters of `units`, on a rank that is at `mesh` among all. Shares the memory that holds them.
  CarriedStates(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshPosition& mesh,
                const TrainingMemory& memory, const MeshAxes& axes);

  /// Writes this rank's parts of them into `units`, whose trainable parameters begin with zeros where they had no states
  /// before. Each state is joined from all ranks' parts, one group at a time. REQUIRES: the same formats of
  /// states, and the same mesh. Collective over `control`.
  void write_to(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control) const;

 private:
  void write_tensor_states(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control) const;
  /// One state of a whole group: its numbers, and its scales where they have some.
  struct Joined {
    std::vector<std::byte> data, scales;
  };

  Joined join(const FlatGroup& group, std::size_t state, Collectives& control) const;
  /// Copies this rank's part of parameter `i` of `target` from `joined`, where it begins at element `begin`.
  void hand_out(const Joined& joined, std::int64_t begin, FlatGroup& target, std::size_t i, std::size_t state) const;

  std::shared_ptr<Collectives> transport_;  ///< the memory came from it, and goes before it
  Arena memory_;
  std::vector<FlatGroup> groups_;  ///< their parts and memory; without unit and storage
  AxisPlacement placement_;
  MeshPosition mesh_;
};

}  // namespace tessera
