#include "tessera/recompute.h"

#include <ATen/Context.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>
#include <utility>
#include <vector>

#include "engine/loop/end_of_backward.h"
#include "engine/loop/recomputing.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The state of each generator that a function of some inputs may draw from: the CPU's, and those of the inputs'
/// devices. Reading a GPU's does not wait for it.
struct RandomStates {
  static RandomStates of(const std::vector<at::Tensor>& inputs) {
    RandomStates states;
    states.add(at::Device(at::kCPU));
    for (const at::Tensor& input : inputs) {
      if (input.defined()) states.add(input.device());
    }
    return states;
  }

  void add(at::Device device) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    for (const auto& [known, state] : entries) {
      if (known == generator) return;
    }
    entries.emplace_back(generator, generator.get_state());
  }
  RandomStates now() const {
    RandomStates states;
    for (const auto& [generator, state] : entries) states.entries.emplace_back(generator, generator.get_state());
    return states;
  }
  void restore() {
    for (auto& [generator, state] : entries) generator.set_state(state);
  }

  std::vector<std::pair<at::Generator, at::Tensor>> entries;
};

/// Generators as they were, put back at the end of the scope.
class WithRandomStates {
 public:
  explicit WithRandomStates(RandomStates& states) : before_(states.now()) { states.restore(); }
  ~WithRandomStates() { before_.restore(); }
  WithRandomStates(const WithRandomStates&) = delete;
  WithRandomStates& operator=(const WithRandomStates&) = delete;

 private:
  RandomStates before_;
};

/// What backward needs to run forward again.
struct Replay : torch::CustomClassHolder {
  TensorFunction function;
  at::ThreadLocalState thread_state;
  RandomStates random_states;
  std::vector<char> requires_grad;  ///< of the defined inputs
  std::vector<char> is_defined;     ///< [input]; autograd takes the defined ones only

  /// All inputs, from those that are defined.
  variable_list all_inputs(at::ArrayRef<at::Tensor> defined) const {
    variable_list inputs(is_defined.size());
    for (std::size_t i = 0, next = 0; i < inputs.size(); ++i) {
      if (is_defined[i]) inputs[i] = defined[next++];
    }
    return inputs;
  }
};

struct Recompute : torch::autograd::Function<Recompute> {
  /// `inputs` must be a TensorList: autograd looks for differentiable inputs in no other kind of list, a vector
  /// included.
  static variable_list forward(AutogradContext* context, at::TensorList inputs, c10::intrusive_ptr<Replay> replay) {
    for (const at::Tensor& input : inputs) replay->requires_grad.push_back(input.requires_grad());
    context->save_for_backward(inputs.vec());
    context->saved_data["replay"] = c10::IValue::make_capsule(replay);
    const at::NoGradGuard no_grad;
    return replay->function(replay->all_inputs(inputs));
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
      const WithRandomStates same_random_numbers(replay.random_states);
      const Recomputing second_time;
      outputs = replay.function(replay.all_inputs(inputs));
    }
    variable_list roots, seeds;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].defined() || !outputs[i].requires_grad() || !output_gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      seeds.push_back(output_gradients[i]);
    }
    if (!roots.empty()) {
      const InnerBackward inner;
      torch::autograd::backward(roots, seeds);
    }
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
  replay->random_states = RandomStates::of(inputs);
  std::vector<at::Tensor> defined;
  for (const at::Tensor& input : inputs) {
    replay->is_defined.push_back(input.defined());
    if (input.defined()) defined.push_back(input);
  }
  return Recompute::apply(at::TensorList(defined), replay);
}

at::Tensor checkpoint(const std::function<at::Tensor(const at::Tensor&)>& function, const at::Tensor& input) {
  const TensorFunction on_list = [function](const std::vector<at::Tensor>& inputs) {
    return std::vector<at::Tensor>{function(inputs.at(0))};
  };
  return checkpoint(on_list, std::vector<at::Tensor>{input}).at(0);
}

}  // namespace tessera
