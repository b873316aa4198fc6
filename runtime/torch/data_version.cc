#include "runtime/torch/data_version.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/VariableHooksInterface.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "runtime/torch/autograd_node.h"

namespace tessera {
namespace {

using at::TensorBase;

class SharedVersions final : public at::impl::VariableHooksInterface {
 public:
  SharedVersions(const VariableHooksInterface& inner, bool (*is_watched)(const TensorBase&))
      : inner_(inner), is_watched_(is_watched) {}

  TensorBase variable_data(const TensorBase& self) const override {
    TensorBase data = inner_.variable_data(self);
    if (is_watched_(self)) {
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
  void set_data(const TensorBase& self, const TensorBase& data) const override { inner_.set_data(self, data); }
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
  bool (*const is_watched_)(const TensorBase&);
};

}  // namespace

void share_version_with_data(bool (*is_watched)(const at::TensorBase& tensor)) {
  // The object is never destroyed: LibTorch may use it until the process ends.
  [[maybe_unused]] static const bool done = [&] {
    at::impl::SetVariableHooks(new SharedVersions(*at::impl::GetVariableHooks(), is_watched));
    return true;
  }();
}

}  // namespace tessera
