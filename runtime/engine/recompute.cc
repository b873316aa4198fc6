#include "tessera/recompute.h"

#include <ATen/Context.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The CPU generator as it was, put back at the end of the scope.
class WithRandomState {
 public:
  explicit WithRandomState(const at::Tensor& state) : generator_(at::globalContext().defaultGenerator(at::kCPU)) {
    before_ = generator_.get_state();
    generator_.set_state(state);
  }
  ~WithRandomState() { generator_.set_state(before_); }

 private:
  at::Generator generator_;
  at::Tensor before_;
};

/// What backward needs to run forward again.
struct Replay : torch::CustomClassHolder {
  TensorFunction function;
  at::ThreadLocalState thread_state;
  at::Tensor random_state;
  std::vector<char> requires_grad;
};

struct Recompute : torch::autograd::Function<Recompute> {
  /// `inputs` must be a TensorList: autograd looks for differentiable inputs in no other kind of list, a vector
  /// included.
  static variable_list forward(AutogradContext* context, at::TensorList inputs, c10::intrusive_ptr<Replay> replay) {
    for (const at::Tensor& input : inputs) replay->requires_grad.push_back(input.requires_grad());
    context->save_for_backward(inputs.vec());
    context->saved_data["replay"] = c10::IValue::make_capsule(replay);
    const at::NoGradGuard no_grad;
    return replay->function(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, variable_list output_gradients) {
    const auto capsule = context->saved_data["replay"].toCapsule();
    Replay& replay = static_cast<Replay&>(*capsule);
    variable_list inputs = context->get_saved_variables();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      inputs[i] = inputs[i].detach().set_requires_grad(replay.requires_grad[i] != 0);
    }
    variable_list outputs;
    {
      const at::ThreadLocalStateGuard as_in_forward(replay.thread_state);
      const at::AutoGradMode with_grad(true);
      const WithRandomState same_random_numbers(replay.random_state);
      outputs = replay.function(inputs);
    }
    variable_list roots, seeds;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad() || !output_gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      seeds.push_back(output_gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, seeds);
    variable_list gradients;
    for (const at::Tensor& input : inputs) gradients.push_back(input.requires_grad() ? input.grad() : at::Tensor());
    gradients.emplace_back();  // of the replay itself
    return gradients;
  }
};

}  // namespace

std::vector<at::Tensor> checkpoint(const TensorFunction& function, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto replay = c10::make_intrusive<Replay>();
  replay->function = function;
  replay->random_state = at::globalContext().defaultGenerator(at::kCPU).get_state();
  return Recompute::apply(at::TensorList(inputs), replay);
}

at::Tensor checkpoint(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input) {
  const TensorFunction on_list = [function](const std::vector<at::Tensor>& inputs) {
    return std::vector<at::Tensor>{function(inputs.at(0))};
  };
  return checkpoint(on_list, std::vector<at::Tensor>{input}).at(0);
}

}  // namespace tessera
