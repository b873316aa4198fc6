#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/memory/training_memory.h"
#include "runtime/comm/collectives.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"

namespace tessera {

/// What an Engine that is gone leaves of a flat group: this rank's parts of parameters and masters. It lives in the
/// storage of the group's parameters, until the next Engine takes the values from there or the module dies. Nothing is
/// sent when an Engine ends; the next one's set-up is collective anyway.
struct KeptGroup {
  std::string unit_name;
  FlatGroup group;  ///< without_module()
  Placement placement;
  MeshPosition mesh;
  std::shared_ptr<const void> memory;  ///< owns what `group` points at
};

/// An Engine ends, and `group`'s storage keeps its part of the values. If `is_readable`, parameters stay readable, with
/// their memory, or with a copy of their own where that memory was not for this program alone and there is memory for a
/// copy. Else whoever reads one gets a c10::Error. `mesh`: where this rank is among all. `transport`: what made `memory`.
void keep(FlatGroup& group, const MemoryPlan& plan, const MeshPosition& mesh, const TrainingMemory& memory,
          const std::shared_ptr<Collectives>& transport, bool is_readable);

/// What an Engine that is gone left of `tensor`'s group, or null.
std::shared_ptr<const KeptGroup> kept_of(const at::Tensor& tensor);

/// The values with which an Engine begins, for parameters that an earlier Engine left behind: fp32 masters, joined from
/// all ranks' parts, one group at a time.
class KeptValues {
 public:
  explicit KeptValues(Collectives& control) : control_(control) {}

  /// `parameter`'s full value on every rank: the master where the parameter is a rounding of it, else what it holds now.
  /// A tensor that no Engine left is returned as it is. Collective where `kept_of(parameter)` is not null.
  at::Tensor value_of(const at::Tensor& parameter);

 private:
  const at::Tensor& joined(const at::Tensor& parameter, const KeptGroup& kept);

  Collectives& control_;
  const c10::StorageImpl* storage_ = nullptr;  ///< of the group that was joined last
  at::Tensor flat_;                            ///< and its values
};

}  // namespace tessera
