#include "runtime/torch/alias_version.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/VariableHooksInterface.h>
#include <ATen/ops/set_ops.h>
#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "runtime/torch/autograd_node.h"

namespace tessera {
namespace {

using at::TensorBase;
using OwnerOf = const c10::TensorImpl* (*)(const TensorBase& alias);

std::atomic<OwnerOf> finds_owner = nullptr;

const c10::TensorImpl* find_owner(const TensorBase& alias) {
  const OwnerOf find = finds_owner.load(std::memory_order_acquire);
  return find ? find(alias) : nullptr;
}

/// Calls `move`, which gives `alias` other memory, and then `count`, which may count the move as a write. An alias of a
/// parameter that leaves the parameter's memory takes a counter of its own before `count`, since nothing is written in
/// the parameter. An alias that is moved over a parameter then shares that parameter's counter.
template <class Move, class Count>
void move_and_share(const TensorBase& alias, const Move& move, const Count& count) {
  c10::TensorImpl* const own = alias.unsafeGetTensorImpl();
  const c10::TensorImpl* const before = find_owner(alias);
  move();
  if (before && before != own && !own->is_inference())
    own->set_version_counter(c10::VariableVersion(own->version_counter().current_version()));
  count();
  const c10::TensorImpl* const owner = find_owner(alias);
  if (owner && owner != own && !own->is_inference()) own->set_version_counter(owner->version_counter());
}

class SharedVersions final : public at::impl::VariableHooksInterface {
 public:
  explicit SharedVersions(const VariableHooksInterface& inner) : inner_(inner) {}

  TensorBase variable_data(const TensorBase& self) const override {
    TensorBase data = inner_.variable_data(self);
    if (find_owner(self)) {
      data.unsafeGetTensorImpl()->set_version_counter(self.unsafeGetTensorImpl()->version_counter());
    }
    return data;
  }

  TensorBase tensor_data(const TensorBase& self) const override { return inner_.tensor_data(self); }
  const NodePtr& grad_fn(const TensorBase& self) const override { return inner_.grad_fn(self); }
  unsigned _register_hook(const TensorBase& self, std::function<TensorBase(const TensorBase&)> hook) const override {
    return inner_._register_hook(self, std::move(hook));
  }
  void remove_hook(const TensorBase& self, unsigned pos) const override { inner_.remove_hook(self, pos); }
  bool is_view(const TensorBase& self) const override { return inner_.is_view(self); }
  const TensorBase& base(const TensorBase& self) const override { return inner_.base(self); }
  const std::string& name(const TensorBase& self) const override { return inner_.name(self); }
  bool is_leaf(const TensorBase& self) const override { return inner_.is_leaf(self); }
  std::int64_t output_nr(const TensorBase& self) const override { return inner_.output_nr(self); }
  void set_data(const TensorBase& self, const TensorBase& data) const override {
    move_and_share(
        self, [&] { inner_.set_data(self, data); }, [] {});
  }
  TensorBase data(const TensorBase& self) const override { return variable_data(self); }
  std::int64_t _version(const TensorBase& self) const override { return inner_._version(self); }
  void retain_grad(const TensorBase& self) const override { inner_.retain_grad(self); }
  bool retains_grad(const TensorBase& self) const override { return inner_.retains_grad(self); }
  void _backward(const at::Tensor& self, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    inner_._backward(self, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const TensorBase& self, bool requires_grad) const override {
    inner_.requires_grad_(self, requires_grad);
  }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    inner_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const TensorBase& self) const override { return inner_.grad_dtype(self); }
  void set_grad_dtype(const TensorBase& self, const std::optional<c10::ScalarType>& dtype) const override {
    inner_.set_grad_dtype(self, dtype);
  }

 private:
  const VariableHooksInterface& inner_;
};

/// Makes a `set_` of `self` by calling `set`, and counts a write of `self`, as LibTorch's own kernels do.
template <class Set>
at::Tensor& set_and_count(at::Tensor& self, const Set& set) {
  const auto set_below = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    set();
  };
  move_and_share(self, set_below, [&] { torch::autograd::impl::bump_version(self); });
  return self;
}

at::Tensor& set_nothing(c10::DispatchKeySet keys, at::Tensor& self) {
  return set_and_count(self, [&] { at::_ops::set_::redispatch(keys & c10::after_ADInplaceOrView_keyset, self); });
}

at::Tensor& set_storage(c10::DispatchKeySet keys, at::Tensor& self, at::Storage source) {
  return set_and_count(self, [&] {
    at::_ops::set__source_Storage::redispatch(keys & c10::after_ADInplaceOrView_keyset, self, std::move(source));
  });
}

at::Tensor& set_part_of_storage(c10::DispatchKeySet keys, at::Tensor& self, at::Storage source, c10::SymInt offset,
                                c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return set_and_count(self, [&] {
    at::_ops::set__source_Storage_storage_offset::redispatch(keys & c10::after_ADInplaceOrView_keyset, self,
                                                             std::move(source), std::move(offset), sizes, strides);
  });
}

at::Tensor& set_tensor(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& source) {
  return set_and_count(
      self, [&] { at::_ops::set__source_Tensor::redispatch(keys & c10::after_ADInplaceOrView_keyset, self, source); });
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

/// Replaces the kernels. It runs when the program starts, since no thread may call an operator meanwhile. LibTorch
/// would warn of each kernel that is replaced, so these warnings are dropped.
const bool has_kernels = [] {
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  // The object is never destroyed: its destructor would take the kernels away.
  static torch::Library& kernels = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::ADInplaceOrView,
                                                       __FILE__, static_cast<std::uint32_t>(__LINE__));
  kernels.impl("set_.source_Storage", &set_storage);
  kernels.impl("set_.source_Storage_storage_offset", &set_part_of_storage);
  kernels.impl("set_.source_Tensor", &set_tensor);
  kernels.impl("set_", &set_nothing);
  return true;
}();

}  // namespace

void share_version_with_aliases(OwnerOf owner_of) {
  // The table is never destroyed: LibTorch may use it until the process ends.
  [[maybe_unused]] static const bool done = [&] {
    finds_owner.store(owner_of, std::memory_order_release);
    at::impl::SetVariableHooks(new SharedVersions(*at::impl::GetVariableHooks()));
    return has_kernels;
  }();
}

}  // namespace tessera
