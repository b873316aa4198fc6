#pragma once

// See docs/glossary.md: flat group.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "engine/memory/training_memory.h"
#include "runtime/comm/collectives.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// This rank's parts of the parameters and masters of a flat group, which stay when their Engine is destroyed. They
/// live in the storage of the group's parameters until the next Engine takes the values or the module is destroyed.
/// Nothing is sent when an Engine ends; the set-up of the next Engine is collective anyway.
struct KeptGroup {
  std::string unit_name;
  FlatGroup group;  ///< result of FlatGroup::without_module()
  Placement placement;
  MeshPosition mesh;
  std::shared_ptr<const void> memory;  ///< owns the memory to which `group` points
};

/// Lets `group`'s storage keep this rank's part of the values; an Engine that is destroyed calls this function. If
/// `is_readable` and the values are gathered, parameters stay readable. They are then read in their own memory or, if
/// other ranks read that memory or it holds the halves of split masters, in a copy. In all other cases, and if no copy
/// can be allocated, reading a parameter throws c10::Error. `mesh`: this rank's position among all ranks. `transport`
/// allocated `memory`.
void keep(FlatGroup& group, const MemoryPlan& plan, const MeshPosition& mesh, const TrainingMemory& memory,
          const std::shared_ptr<Collectives>& transport, bool is_readable);

/// Returns the values that a destroyed Engine left for the group of `tensor`, or null.
std::shared_ptr<const KeptGroup> kept_of(const at::Tensor& tensor);

/// Finds the first values of parameters that an earlier Engine left behind: fp32 masters, joined from the parts of all
/// ranks, one group at a time. FirstValues owns a KeptValues while it fills an Engine.
class KeptValues {
 public:
  explicit KeptValues(Collectives& control) : control_(control) {}

  /// Returns the full value of `parameter` on every rank, on the CPU: the master if the parameter equals the rounded
  /// master, else the present value of the parameter. A tensor that no Engine left is returned as it is. It is
  /// collective where `kept_of(parameter)` is not null. Throws tessera::Error (64) if the earlier Engine had another
  /// number of ranks.
  at::Tensor value_of(const at::Tensor& parameter);

 private:
  const at::Tensor& joined(const at::Tensor& parameter, const KeptGroup& kept);

  Collectives& control_;
  const c10::StorageImpl* storage_ = nullptr;  ///< the storage of the group that was joined last
  at::Tensor flat_;                            ///< the values of that group
};

}  // namespace tessera
