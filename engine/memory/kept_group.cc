#include "engine/memory/kept_group.h"

#include <ATen/Functions.h>

#include <set>

#include "engine/memory/master_weights.h"
#include "runtime/border/throw.h"
#include "sharding/scalar_type.h"
#include "sharding/storage_access.h"
#include "sharding/unrecorded.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using KeptPointer = std::shared_ptr<const KeptGroup>;

/// Its address tells a storage that holds a KeptGroup.
void drop(void* kept) { delete static_cast<KeptPointer*>(kept); }

MeshPosition position_of(int rank, const MeshPosition& mesh) {
  return {mesh.replicate_size, mesh.shard_size, rank / mesh.shard_size, rank % mesh.shard_size};
}

/// The group's values on every rank: each part is sent by the first rank that holds it.
at::Tensor join_parts(const KeptGroup& kept, Collectives& control) {
  const FlatGroup& group = kept.group;
  if (kept.mesh.world_size() != control.size()) {
    throw Error(ExitCode::kUsage, "unit " + kept.unit_name + " was sharded over " +
                                      std::to_string(kept.mesh.world_size()) +
                                      " ranks by an Engine that is gone, and now " + std::to_string(control.size()) +
                                      " ranks take it. hint: make the second Engine in a job of the same size");
  }
  const std::int64_t numel = group.layout.numel();
  const at::Tensor flat = at::zeros({numel}, at::TensorOptions(flat_type_of(group)));
  const AxisPlacement axes = group.trainable ? kept.placement.optimizer : kept.placement.parameters;
  read_values(group, flat);
  if (owned(axes, kept.mesh, numel).numel == numel) return flat;
  std::set<std::int64_t> sent;
  for (int rank = 0; rank < control.size(); ++rank) {
    const Extent part = owned(axes, position_of(rank, kept.mesh), numel);
    if (!sent.insert(part.offset).second) continue;
    const at::Tensor piece = flat.narrow(0, part.offset, part.numel);
    throw_if_error(control.broadcast(kept.unit_name, piece.data_ptr(), piece.nbytes(), rank).wait());
  }
  return flat;
}

/// `master` as the group's parameters hold it, widened again. A split master's high half rounds ties up, not to even.
at::Tensor rounded(const at::Tensor& master, const FlatGroup& group) {
  if (group.master_kind != MasterKind::kSplitBF16) return master.to(scalar_type_of(group.dtype)).to(at::kFloat);
  const at::Tensor bits = master.contiguous().view(at::kInt);
  return bits.add(0x8000).bitwise_right_shift(16).bitwise_left_shift(16).view(at::kFloat);
}

}  // namespace

void keep(FlatGroup& group, std::shared_ptr<const KeptGroup> kept, std::byte* values, const std::string& refusal) {
  c10::StorageImpl& storage = *group.storage;
  if (!values) set_refusal(storage, refusal);
  storage.set_data_ptr_noswap(at::DataPtr(values, new KeptPointer(std::move(kept)), &drop, group.device));
  storage.set_nbytes(group.gathered_bytes());  // views are in bounds, so that it is the access which throws
  refuse_access(storage, values == nullptr);
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
  return at::where(rounded(master, kept->group).eq(wide), master, wide);
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
