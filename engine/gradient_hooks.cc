#include "engine/gradient_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace tessera {
namespace {

namespace autograd = torch::autograd;

struct TakeGradient : autograd::PostAccumulateGradHook {
  TakeGradient(Reducer& reducer, FlatGroup& group, std::size_t parameter)
      : reducer(reducer), group(group), parameter(parameter) {}
  void operator()(const autograd::Variable&) override { reducer.take(group, parameter); }

  Reducer& reducer;
  FlatGroup& group;
  std::size_t parameter;
};

}  // namespace

GradientHooks::GradientHooks(const std::vector<std::unique_ptr<Unit>>& units, Reducer& reducer) : units_(units) {
  for_each_trainable(units_, [&](FlatGroup& group) {
    for (std::size_t i = 0; i < group.parameters.size(); ++i) {
      autograd::impl::set_post_acc_grad_hooks(group.parameters[i].tensor,
                                              std::make_unique<TakeGradient>(reducer, group, i));
    }
  });
}

GradientHooks::~GradientHooks() {
  for_each_trainable(units_, [](FlatGroup& group) {
    for (FlatParameter& parameter : group.parameters) {
      autograd::impl::set_post_acc_grad_hooks(parameter.tensor, nullptr);
    }
  });
}

}  // namespace tessera
