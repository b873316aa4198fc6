#include "engine/parameters/parameter_checks.h"

#include <ATen/MemoryOverlap.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <string>

#include "runtime/border/phrase.h"
#include "runtime/torch/alias_version.h"
#include "sharding/value_hash.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::uint32_t version_of(const FlatParameter& parameter) {
  return parameter.tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

[[noreturn]] void throw_written(const FlatParameter& parameter) {
  throw Error(ExitCode::kUsage, "parameter " + parameter.name + " was written in place outside " +
                                    say(phrases::kWriteGuard) +
                                    ", where the Engine cannot follow; or under one that an exception ended, which "
                                    "stores nothing. [T0250] hint: make such a guard around the write, on all ranks; a "
                                    "module that writes its parameters in forward cannot be trained sharded");
}

[[noreturn]] void throw_written_secretly(const FlatParameter& parameter) {
  throw Error(ExitCode::kUsage,
              "parameter " + parameter.name + " was written through a raw pointer outside " +
                  say(phrases::kWriteGuard) +
                  " (\"check.values\"). [T0251] hint: make such a guard around the write, on all ranks");
}

[[noreturn]] void throw_unfrozen(const FlatParameter& parameter) {
  throw Error(ExitCode::kUsage,
              "parameter " + parameter.name +
                  " was frozen when the Engine was made and requires gradients now, for which there is "
                  "no memory. [T0252] hint: call engine.set_trainable(\"" +
                  parameter.name + "\", " + say(phrases::kTrue) + ") on all ranks in place of requires_grad_()");
}

/// A tensor's place in memory, with its name.
struct MemoryOf {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;  ///< address behind the tensor's last element
  const at::Tensor* tensor = nullptr;
  std::string name;
  bool trains = false;
};

/// Returns the parameter in whose memory `alias` begins, or null (share_version_with_aliases).
const c10::TensorImpl* owner_of(const at::TensorBase& alias) {
  const FlatGroup* const group = flat_group_of(alias);
  if (!group) return nullptr;
  const std::int64_t element =
      alias.storage_offset() * static_cast<std::int64_t>(alias.element_size()) / group->element_bytes();
  const c10::TensorImpl* owner = nullptr;
  for (std::size_t i = 0; i < group->parameters.size(); ++i) {
    if (owner && group->layout.extent(i).offset > element) break;
    owner = group->parameters[i].tensor.unsafeGetTensorImpl();
    if (owner == alias.unsafeGetTensorImpl())
      break;  // `alias` is this parameter; another one without elements may
              // begin here too
  }
  return owner;
}

void add_memory(const at::Tensor& tensor, const std::string& name, std::vector<MemoryOf>& all) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0 || tensor.is_meta() || unit_of(tensor)) return;
  // A tensor that a destroyed Engine left behind must not be read, so the pointer to its memory is taken without a
  // check.
  const void* const memory = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  if (!memory) return;
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto bytes = static_cast<std::int64_t>(tensor.element_size());
  const auto* const begin = static_cast<const std::byte*>(memory) + tensor.storage_offset() * bytes;
  all.push_back({begin, begin + (last + 1) * bytes, &tensor, name, tensor.requires_grad()});
}

}  // namespace

void expect_own_memory(const std::vector<std::unique_ptr<Unit>>& units, const NamedTensors& whole) {
  std::vector<MemoryOf> all;
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    add_memory(parameter.tensor, "parameter " + parameter.name, all);
  });
  for (const auto& item : whole)
    add_memory(item.value(), (item.value().requires_grad() ? "ignored parameter " : "buffer ") + item.key(), all);
  std::ranges::sort(all, std::less<>(), &MemoryOf::begin);
  for (std::size_t i = 0; i < all.size(); ++i) {
    for (std::size_t k = i + 1; k < all.size() && all[k].begin < all[i].end; ++k) {
      if (!all[i].trains && !all[k].trains) continue;
      const at::MemOverlapStatus overlap = at::get_overlap_status(*all[i].tensor, *all[k].tensor);
      if (overlap != at::MemOverlapStatus::Full && overlap != at::MemOverlapStatus::Partial) continue;
      throw Error(
          ExitCode::kUsage,
          all[i].name + " and " + all[k].name +
              " share memory, but are two tensors, of which each would get memory of its own; so what trains the "
              "one would no longer change the other. [T0253] hint: tie parameters by registering one tensor twice (" +
              say(phrases::kTied) + "), or clone");
    }
  }
}

ParameterChecks::ParameterChecks(const std::vector<std::unique_ptr<Unit>>& units, bool checks_values,
                                 c10::Device device)
    : units_(units), checks_values_(checks_values), device_(device) {
  share_version_with_aliases(&owner_of);
}

void ParameterChecks::accept() {
  for (const auto& unit : units_) accept(*unit);
}

void ParameterChecks::accept(Unit& unit) {
  for_each_parameter(unit, [&](FlatGroup& group, std::size_t i) {
    FlatParameter& parameter = group.parameters[i];
    parameter.version = version_of(parameter);
    if (checks_values_) parameter.hash = hash_of_part(group, i, device_);
  });
}

void ParameterChecks::expect_accepted(bool may_unfreeze) const {
  for_each_parameter(units_, [&](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    expect_in_place(group, i);
    if (version_of(parameter) != parameter.version) throw_written(parameter);
    if (checks_values_ && hash_of_part(group, i, device_) != parameter.hash) throw_written_secretly(parameter);
    if (!may_unfreeze && !group.trainable && parameter.tensor.requires_grad()) throw_unfrozen(parameter);
  });
}

}  // namespace tessera
