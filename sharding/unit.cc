#include "sharding/unit.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "sharding/scalar_type.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Nothing to delete: arenas own the memory, the engine owns the units. Its address marks a watched storage.
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

void FlatGroup::attach(std::byte* memory) {
  full = memory;
  const bool watched = unit->residency() != nullptr;
  c10::StorageImpl& impl = *storage;
  void* const mark = watched ? unit : nullptr;
  impl.set_data_ptr_noswap(at::DataPtr(memory, mark, &leave, device));
  impl.set_nbytes(memory ? gathered_bytes() : 0);
}

std::byte* FlatGroup::updated() const {
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

void Unit::watch(Residency* residency) {
  residency_ = residency;
  for (auto& group : groups) group->attach(group->full);
}

void Unit::poison(const std::string& message) {
  for (auto& group : groups) {
    if (!group->storage) continue;
    group->storage->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
    group->storage->set_nbytes(group->gathered_bytes());  // views are in bounds, so that it is the access which throws
  }
}

std::vector<Unit*> pointers_to(const std::vector<std::unique_ptr<Unit>>& units) {
  std::vector<Unit*> pointers;
  for (const auto& unit : units) pointers.push_back(unit.get());
  return pointers;
}

Unit* unit_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const at::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &leave ? static_cast<Unit*>(data.get_context()) : nullptr;
}

void rebase(FlatParameter& parameter, const FlatGroup& group, std::int64_t offset) {
  const at::NoGradGuard no_grad;
  const at::Tensor place = at::empty({0}, at::TensorOptions(scalar_type_of(group.dtype)).device(group.device))
                               .set_(c10::Storage(group.storage), offset, parameter.sizes, parameter.strides);
  if (parameter.tensor.is_meta()) {
    // set_data refuses to change devices; a deferred parameter has been used by nothing yet.
    parameter.tensor.unsafeGetTensorImpl()->shallow_copy_from(place.getIntrusivePtr());
  } else {
    parameter.tensor.set_data(place);
  }
}

}  // namespace tessera
