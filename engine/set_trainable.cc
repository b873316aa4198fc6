#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_checkpoints.h"
#include "engine/engine_state.h"
#include "engine/expect.h"
#include "engine/parameter_groups.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

struct Named {
  std::vector<at::Tensor> tensors;
  bool replans = false;  ///< whether the set of parameters that have gradients and states would change
};

/// The parameters that `pattern` names.
Named named(const std::vector<std::unique_ptr<Unit>>& units, const std::string& pattern, bool trainable) {
  Named found;
  std::vector<std::string> names;
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    names.push_back(parameter.name);
    if (!is_named(parameter, pattern)) return;
    found.tensors.push_back(parameter.tensor);
    found.replans |= group.trainable != trainable;
  });
  expect(!found.tensors.empty(), "set_trainable: \"", pattern, "\" matches no parameter", did_you_mean(pattern, names));
  return found;
}

}  // namespace

void Engine::set_trainable(const std::string& pattern, bool trainable) {
  State& s = *state_;
  std::unique_ptr<State> replaced;  // goes when nothing refers to it any more
  expect(s.microbatch == 0, "set_trainable between backward and step: call step() or zero_grad() first");
  s.expect_weights("set_trainable");
  expect(s.open_guards == 0, "set_trainable under a Gathered guard: close that guard first");
  expect(!s.durable,
         "set_trainable with \"durable\", whose commits are of one plan. hint: save a checkpoint, and load it in a "
         "run that makes the change before its Engine");
  expect(!s.outer,
         "set_trainable with \"sync\" local_sgd or diloco, whose outer steps are of one plan. hint: save a checkpoint, "
         "and load it in a "
         "run that makes the change before its Engine");
  auto [tensors, replans] = named(s.units, pattern, trainable);
  EngineCheckpoints(*this).finish();
  s.or_abort("set_trainable", [&, &tensors = tensors, replans = replans] {
    s.expect_parameters();
    if (!replans) {
      for (at::Tensor& tensor : tensors) tensor.requires_grad_(trainable);
      return;
    }
    auto next = s.planned_anew(s.attempts, [&] {
      for (at::Tensor& tensor : tensors) tensor.requires_grad_(trainable);
    });
    replaced = std::exchange(state_, std::move(next));
  });
}

}  // namespace tessera
