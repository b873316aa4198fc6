#include "runtime/engine/gradient_hooks.h"

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

template <class Visit>
void for_each_parameter(const std::vector<std::unique_ptr<Unit>>& units, const Visit& visit) {
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      for (std::size_t i = 0; group->trainable && i < group->parameters.size(); ++i) visit(*group, i);
    }
  }
}

}  // namespace

GradientHooks::GradientHooks(const std::vector<std::unique_ptr<Unit>>& units, Reducer& reducer) : units_(units) {
  for_each_parameter(units_, [&](FlatGroup& group, std::size_t i) {
    autograd::impl::set_post_acc_grad_hooks(group.parameters[i].tensor,
                                            std::make_unique<TakeGradient>(reducer, group, i));
  });
}

GradientHooks::~GradientHooks() {
  for_each_parameter(units_, [](FlatGroup& group, std::size_t i) {
    autograd::impl::set_post_acc_grad_hooks(group.parameters[i].tensor, nullptr);
  });
}

}  // namespace tessera
