#include "sharding/unit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "runtime/torch/storage_access.h"
#include "sharding/observed_pointers.h"
#include "sharding/scalar_type.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// A deleter that deletes nothing, since arenas own the memory and the engine owns the units. The address of this
/// function marks a storage that belongs to a unit.
void leave(void*) {}

const char* name_of(Unit::State state) {
  switch (state) {
    case Unit::State::kReleased:
      return "released";
    case Unit::State::kGathering:
      return "gathering";
    case Unit::State::kGathered:
      return "gathered";
  }
  return "?";
}

}  // namespace

FlatGroup FlatGroup::without_module() const {
  FlatGroup copy = *this;
  copy.unit = nullptr;
  copy.parameters.clear();
  copy.storage.reset();
  return copy;
}

void FlatGroup::make_storage() {
  storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), c10::SymInt(gathered_bytes()),
                                                  at::DataPtr(nullptr, device),
                                                  /*allocator=*/nullptr, /*resizable=*/false);
  const std::string first = parameters.empty() ? std::string() : " (" + parameters[0].name + ", ...)";
  refusal = "the parameters of unit " + unit->name + first +
            " are sharded and not gathered: their memory is another unit's when no operator reads them, or they are on "
            "their way from "
            "other ranks after a step. [T0638] hint: make a guard, " +
            say(phrases::kGuard) +
            ", on all ranks around code that reads parameters, or views of them, outside operators (" +
            say(phrases::kMemoryOf) + "); or read a copy (clone)";
  set_refusal(*storage, refusal);
}

void FlatGroup::attach(std::byte* memory) {
  full = memory;
  point_at(memory);
  set_access();
}

void FlatGroup::point_at(std::byte* memory) { storage->set_data_ptr_noswap(at::DataPtr(memory, unit, &leave, device)); }

void FlatGroup::set_access() {
  const bool is_readable = unit->lets_read(*this);
  const bool is_closed = trainable && unit->is_closed();
  std::byte* const shown = is_readable || is_closed || !device.is_cpu() ? nullptr : observed_pointer(gathered_bytes());
  std::byte* const memory = shown ? shown : full;
  if (storage->_mutable_data_ptr_no_checks().get() != memory) point_at(memory);
  refuse_access(*storage, !is_readable && !shown);
}

std::byte* FlatGroup::updated() const {
  if (!shard) return nullptr;
  return shard + (optimizer_part.offset - parameter_part.offset) * element_bytes();
}

void Unit::become(State next) {
  const bool allowed = (state_ == State::kReleased && next != State::kReleased) ||
                       (state_ == State::kGathering && next != State::kGathering) ||
                       (state_ == State::kGathered && next == State::kReleased);
  TORCH_INTERNAL_ASSERT(allowed, "unit ", name, ": ", name_of(state_), " -> ", name_of(next));
  state_ = next;
}

UnitShape Unit::shape() const {
  UnitShape shape{name, {}};
  for (const auto& group : groups) shape.groups.push_back(group->shape());
  return shape;
}

std::int64_t Unit::gathered_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& group : groups) bytes += group->gathered_bytes();
  return bytes;
}

/// Makes storages stop pointing to this unit, since tensors may outlive it.
Unit::~Unit() {
  if (keeper_) remove_observed(*this);
  for (auto& group : groups) {
    if (!group->storage) continue;
    const at::DataPtr& data = group->storage->_mutable_data_ptr_no_checks();
    if (data.get_deleter() != &leave) continue;
    group->storage->set_data_ptr_noswap(at::DataPtr(nullptr, group->device));
    refuse_access(*group->storage, true);
  }
}

void Unit::poison(const std::string& message) {
  for (auto& group : groups) {
    if (!group->storage) continue;
    set_refusal(*group->storage, message);
    refuse_access(*group->storage, true);
  }
}

void Unit::close() {
  is_closed_ = true;
  if (closed_text_.empty()) {
    closed_text_ =
        "the parameters of unit " + name +
        " are being updated: their gradients were complete (optimizer.in_backward), so nothing may read them before "
        "engine.step(). [T0639] hint: read parameters before backward or after step; for a backward that reads them "
        "again once their gradients are made, as one does that runs inside another, set optimizer.in_backward to false";
  }
  for (auto& group : groups) {
    if (!group->trainable) continue;
    set_refusal(*group->storage, closed_text_);
    refuse_access(*group->storage, true);
  }
}

void Unit::reopen() {
  if (!is_closed_) return;
  is_closed_ = false;
  for (auto& group : groups) {
    if (!group->trainable) continue;
    set_refusal(*group->storage, group->refusal);
    group->set_access();
  }
}

void Unit::watch(UnitKeeper* keeper, bool lends) {
  if (!keeper_ && keeper) add_observed(*this);
  if (keeper_ && !keeper) remove_observed(*this);
  keeper_ = keeper;
  lends_ = lends;
}

void Unit::pin() {
  if (pins_++ > hidden_pins_ || !lends_ || state_ != State::kGathered) return;
  for (auto& group : groups) group->set_access();
}

void Unit::unpin() {
  if (--pins_ > hidden_pins_ || !lends_) return;
  for (auto& group : groups) group->set_access();
}

void Unit::hide_pins(int pins) {
  hidden_pins_ = pins;
  if (!lends_ || state_ != State::kGathered) return;
  for (auto& group : groups) group->set_access();
}

std::vector<Unit*> pointers_to(const std::vector<std::unique_ptr<Unit>>& units) {
  std::vector<Unit*> pointers;
  for (const auto& unit : units) pointers.push_back(unit.get());
  return pointers;
}

Unit* unit_of(const at::TensorBase& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return unit_of(*tensor.storage().unsafeGetStorageImpl());
}

Unit* unit_of(c10::StorageImpl& storage) {
  const at::DataPtr& data = storage._mutable_data_ptr_no_checks();
  return data.get_deleter() == &leave ? static_cast<Unit*>(data.get_context()) : nullptr;
}

FlatGroup* flat_group_of(const at::TensorBase& tensor) {
  const Unit* const unit = unit_of(tensor);
  if (!unit) return nullptr;
  for (const auto& group : unit->groups) {
    if (group->storage.get() == tensor.storage().unsafeGetStorageImpl()) return group.get();
  }
  return nullptr;
}

bool is_lent(const at::TensorBase& tensor) {
  const FlatGroup* const group = flat_group_of(tensor);
  return group && group->unit->lends(*group);
}

bool is_in_place(const FlatGroup& group, std::size_t i) {
  const at::Tensor& tensor = group.parameters[i].tensor;
  if (!tensor.has_storage()) return false;
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  // The storage must point to memory of the Engine. Memory from other sources (share_memory) does not have the unit's
  // mark.
  if (storage != group.storage.get() || unit_of(*storage) != group.unit) return false;
  // A transposed or cut view of the parameter begins at the same offset.
  const FlatParameter& parameter = group.parameters[i];
  return tensor.unsafeGetTensorImpl()->storage_offset() == group.layout.extent(i).offset &&
         tensor.sizes() == at::IntArrayRef(parameter.sizes) &&
         (parameter.numel == 0 || tensor.strides() == at::IntArrayRef(parameter.strides)) &&
         tensor.scalar_type() == scalar_type_of(group.dtype);
}

void expect_in_place(const FlatGroup& group, std::size_t i) {
  if (is_in_place(group, i)) return;
  throw Error(ExitCode::kUsage, "parameter " + group.parameters[i].name +
                                    " was given other memory, or another view of its own (" +
                                    say(phrases::kOtherMemory) +
                                    "), so the Engine and the module no longer mean the same numbers. [T0640] hint: do "
                                    "that before the Engine is made, or under " +
                                    say(phrases::kWriteGuard) + " on all ranks");
}

void rebase(FlatParameter& parameter, const FlatGroup& group, std::int64_t offset) {
  const at::NoGradGuard no_grad;
  const at::Tensor place = at::empty({0}, at::TensorOptions(scalar_type_of(group.dtype)).device(group.device))
                               .set_(c10::Storage(group.storage), offset, parameter.sizes, parameter.strides);
  if (parameter.tensor.is_meta()) {
    // set_data refuses to change devices. shallow_copy_from is safe here, since nothing has used a deferred parameter
    // yet.
    parameter.tensor.unsafeGetTensorImpl()->shallow_copy_from(place.getIntrusivePtr());
  } else {
    parameter.tensor.set_data(place);
  }
}

}  // namespace tessera
