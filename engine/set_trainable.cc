#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine_checkpoints.h"
#include "engine/engine_state.h"
#include "engine/parameters/parameter_groups.h"
#include "runtime/base/text.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "runtime/config/strategy_file.h"

namespace tessera {
namespace {

struct Named {
  std::vector<at::Tensor> tensors;
  bool replans = false;  ///< whether the set of parameters that have gradients and states changes
};

/// Returns the parameters that `patterns` name.
Named named(const std::vector<std::unique_ptr<Unit>>& units, std::span<const std::string> patterns, bool trainable) {
  Named found;
  std::vector<std::string> names;
  std::vector<bool> fits(patterns.size());
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    names.push_back(parameter.name);
    bool is_meant = false;
    for (std::size_t p = 0; p < patterns.size(); ++p) {
      if (!is_named(parameter, patterns[p])) continue;
      fits[p] = is_meant = true;
    }
    if (!is_meant) return;
    found.tensors.push_back(parameter.tensor);
    found.replans |= group.trainable != trainable;
  });
  for (std::size_t p = 0; p < patterns.size(); ++p)
    expect(fits[p], "set_trainable: \"", patterns[p], "\" matches no parameter", hint_of_names(patterns[p], names));
  return found;
}

/// Assigns the parameters of `units` to the groups of `optimizer`. The last of these groups is new. If this function
/// throws, all parameters keep their groups.
void assign_new_group(const std::vector<std::unique_ptr<Unit>>& units, const OptimizerConfig& optimizer) {
  try {
    assign_groups(units, optimizer);
  } catch (...) {
    for_each_parameter(units, [&](FlatGroup& group, std::size_t i) {
      std::size_t& index = group.parameters[i].group;
      if (index == optimizer.groups.size() - 1) index = FlatParameter::kNoGroup;
    });
    throw;
  }
}

}  // namespace

void Engine::State::expect_may_plan_anew(const char* what) const {
  expect(training.window.microbatch == 0, what,
         " between backward and step. [T0274] hint: call step() or zero_grad() first");
  training.expect_weights(what);
  expect(training.values.open_guards == 0, what, " under a Gathered guard. [T0275] hint: close that guard first");
  expect(!saving.durable, what,
         " with \"durable\", whose commits are of one plan. [T0276] hint: save a checkpoint, and load it in a run that "
         "makes the change before its Engine");
  expect(
      !training.sync.is_apart(), what,
      " with \"sync\" other than each_step, whose outer steps or common parameters are of one plan. [T0277] hint: save "
      "a checkpoint, and load it in a run that makes the change before its Engine");
}

void Engine::set_trainable(const std::string& pattern, bool trainable) { set_trainable({&pattern, 1}, trainable); }

void Engine::set_trainable(std::span<const std::string> patterns, bool trainable) {
  State& s = *state_;
  std::unique_ptr<State> replaced;  // the earlier State, which is freed when the function returns
  s.expect_may_plan_anew("set_trainable");
  auto [tensors, replans] = named(s.training.units, patterns, trainable);
  EngineCheckpoints(*this).finish();
  s.job.or_abort("set_trainable", [&, &tensors = tensors, replans = replans] {
    s.training.expect_parameters(/*may_unfreeze=*/true);
    if (!replans) {
      for (at::Tensor& tensor : tensors) tensor.requires_grad_(trainable);
      return;
    }
    auto next = s.planned_anew(s.training.times.attempts, [&] {
      for (at::Tensor& tensor : tensors) tensor.requires_grad_(trainable);
    });
    replaced = std::exchange(state_, std::move(next));
  });
}

void Engine::add_group(const ParameterGroup& group) {
  State& s = *state_;
  std::unique_ptr<State> replaced;
  s.expect_may_plan_anew("add_group");
  // References that strategy() has returned stay valid, since the new strategy keeps the old one alive.
  const std::shared_ptr<Strategy> extended(new Strategy(s.job.strategy),
                                           [before = s.job.given_strategy](const Strategy* gone) { delete gone; });
  extended->optimizer.groups.push_back(group);
  throw_if_error(check_strategy(*extended));
  assign_new_group(s.training.units, extended->optimizer);
  std::vector<at::Tensor> tensors;
  for_each_parameter(s.training.units, [&](const FlatGroup& flat, std::size_t i) {
    if (flat.parameters[i].group == extended->optimizer.groups.size() - 1) tensors.push_back(flat.parameters[i].tensor);
  });
  EngineCheckpoints(*this).finish();
  s.job.or_abort("add_group", [&] {
    s.training.expect_parameters(/*may_unfreeze=*/true);
    auto next = s.planned_anew(
        s.training.times.attempts,
        [&] {
          for (at::Tensor& tensor : tensors) tensor.requires_grad_(true);
        },
        extended);
    replaced = std::exchange(state_, std::move(next));
  });
}

}  // namespace tessera
