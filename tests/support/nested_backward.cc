#include "tests/support/nested_backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace tessera::testing {
namespace {

using TensorFunction = std::function<at::Tensor(const at::Tensor&)>;

struct Held : torch::CustomClassHolder {
  explicit Held(const TensorFunction& given) : function(given) {}
  TensorFunction function;
};

struct Nested : torch::autograd::Function<Nested> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const c10::intrusive_ptr<Held>& held) {
    context->save_for_backward({input});
    context->saved_data["held"] = c10::IValue::make_capsule(held);
    const at::NoGradGuard no_grad;
    return held->function(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto held = context->saved_data["held"].toCapsule();
    const at::Tensor input = context->get_saved_variables().at(0).detach().set_requires_grad(true);
    const at::AutoGradMode with_grad(true);
    torch::autograd::backward({static_cast<Held&>(*held).function(input)}, {gradients.at(0)});
    return {input.grad(), at::Tensor()};
  }
};

}  // namespace

at::Tensor with_nested_backward(const TensorFunction& function, const at::Tensor& input) {
  return Nested::apply(input, c10::make_intrusive<Held>(function));
}

}  // namespace tessera::testing
