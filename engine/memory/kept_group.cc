#include "engine/memory/kept_group.h"

#include <ATen/Functions.h>

#include <cstring>

#include "engine/memory/master_weights.h"
#include "runtime/base/log.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "runtime/torch/storage_access.h"
#include "sharding/scalar_type.h"
#include "sharding/unrecorded.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using KeptPointer = std::shared_ptr<const KeptGroup>;

/// The deleter of a storage that holds a KeptGroup. Such a storage is recognized by this function's address.
void drop(void* kept) { delete static_cast<KeptPointer*>(kept); }

/// Joins the group's values on every rank. The first rank that holds a part sends it.
at::Tensor join_parts(const KeptGroup& kept, Collectives& control) {
  const FlatGroup& group = kept.group;
  if (kept.mesh.world_size() != control.size()) {
    throw Error(ExitCode::kUsage, "unit " + kept.unit_name + " was sharded over " +
                                      std::to_string(kept.mesh.world_size()) +
                                      " ranks by an Engine that is gone, and now " + std::to_string(control.size()) +
                                      " ranks take it. [T0225] hint: make the second Engine in a job of the same size");
  }
  const std::int64_t numel = group.layout.numel();
  const at::Tensor flat = at::zeros({numel}, at::TensorOptions(flat_type_of(group)));
  const AxisPlacement axes = group.trainable ? kept.placement.optimizer : kept.placement.parameters;
  read_values(group, flat);
  if (owned(axes, kept.mesh, numel).numel == numel) return flat;
  for_each_part(axes, kept.mesh, numel, [&](int rank, Extent part) {
    const at::Tensor piece = flat.narrow(0, part.offset, part.numel);
    throw_if_error(control.broadcast(kept.unit_name, piece.data_ptr(), piece.nbytes(), rank).wait());
  });
  return flat;
}

/// The memory of an Engine's parameters that stays after the Engine. It is freed before the transport that made it.
struct KeptMemory {
  std::shared_ptr<Collectives> transport;
  Arena parameters, masters, copy;
};

/// Copies the gathered parameters. The result is empty if there is no memory for the copy. An empty result is no error,
/// because the end of an Engine must not fail, and the next Engine does not need the copy.
Arena copy_for_reading(const FlatGroup& group) {
  try {
    Arena copy = Arena::plain("parameters", group.gathered_bytes());
    std::memcpy(copy.data(), group.full, static_cast<std::size_t>(group.gathered_bytes()));
    return copy;
  } catch (const Error& error) {
    log_warning("unit " + group.unit->name +
                ": its parameters cannot be read once the Engine is gone: " + error.message());
    return {};
  }
}

}  // namespace

void keep(FlatGroup& group, const MemoryPlan& plan, const MeshPosition& mesh, const TrainingMemory& memory,
          const std::shared_ptr<Collectives>& transport, bool is_readable) {
  auto owner = std::make_shared<KeptMemory>(KeptMemory{transport, memory.parameters, memory.masters, Arena()});
  auto kept = std::make_shared<KeptGroup>();
  kept->unit_name = group.unit->name;
  kept->placement = plan.placement();
  kept->mesh = mesh;
  kept->group = group.without_module();
  is_readable = is_readable && group.full != nullptr;  // else the values of other ranks are not gathered
  std::byte* values = is_readable ? group.full : nullptr;
  // The program must not write memory that other ranks read, or that holds the halves of split masters. In these cases
  // it gets a copy.
  const bool is_split = group.master_kind == MasterKind::kSplitBF16 && group.device.is_cpu();
  if (is_readable && (kept->placement.shared || is_split)) {
    owner->copy = copy_for_reading(group);
    values = owner->copy.data();
    is_readable = values != nullptr;
  }
  kept->group.full = values;
  kept->memory = std::move(owner);

  c10::StorageImpl& storage = *group.storage;
  if (!is_readable) {
    set_refusal(storage, "unit " + kept->unit_name +
                             (plan.parameters_on_host()        ? " was put in its GPU's host's memory"
                              : group.parameters_below.carrier ? " was put on disk"
                                                               : " was sharded") +
                             " by an Engine that is gone. [T0226] hint: the next Engine over this module takes the "
                             "values; to read them, make a guard while an Engine lives: " +
                             say(phrases::kGuard));
  }
  storage.set_data_ptr_noswap(at::DataPtr(values, new KeptPointer(std::move(kept)), &drop, group.device));
  storage.set_nbytes(group.gathered_bytes());  // keeps views inside the storage, so that only an access throws
  refuse_access(storage, !is_readable);
}

std::shared_ptr<const KeptGroup> kept_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const at::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &drop ? *static_cast<const KeptPointer*>(data.get_context()) : nullptr;
}

at::Tensor KeptValues::value_of(const at::Tensor& parameter) {
  const auto kept = kept_of(parameter);
  if (!kept) return parameter;
  const Unrecorded unrecorded;
  const at::Tensor master =
      joined(parameter, *kept).as_strided(parameter.sizes(), parameter.strides(), parameter.storage_offset());
  const bool readable = kept->group.full != nullptr;
  if (!readable) return master.clone();
  const at::Tensor now = parameter.detach().cpu();
  if (master.scalar_type() == now.scalar_type()) return now.clone();
  const at::Tensor wide = now.to(at::kFloat);
  return at::where(rounded_master(master, kept->group).eq(wide), master, wide);
}

const at::Tensor& KeptValues::joined(const at::Tensor& parameter, const KeptGroup& kept) {
  const c10::StorageImpl* const storage = parameter.storage().unsafeGetStorageImpl();
  if (storage != storage_) {
    flat_ = join_parts(kept, control_);
    storage_ = storage;
  }
  return flat_;
}

}  // namespace tessera
