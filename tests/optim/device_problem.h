#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "optim/cuda/device_layers.h"
#include "optim/cuda/device_norm.h"
#include "optim/cuda/device_step.h"
#include "optim/rule_optimizer.h"
#include "tests/optim/device_memory.h"
#include "tests/optim/step_problem.h"

// Compares optimizer steps on a device with steps on the CPU. Programs that include this header are built twice. One
// program contains the kernels' source and runs it on the host thread by thread (kernels_on_host.cc), for machines
// without a GPU. The other program contains the kernels themselves, and has the label gpu.

namespace tessera {
namespace {

constexpr WeightFormat kWeights[] = {WeightFormat::kF32, WeightFormat::kF32AndF32, WeightFormat::kF32AndBF16,
                                     WeightFormat::kF32AndF16, WeightFormat::kSplitBF16};
constexpr StateDType kStates[] = {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit};

inline OptimizerConfig adamw(StateDType states = StateDType::kF32) {
  return {.type = OptimizerType::kAdamW,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .state_dtype = states};
}

/// Returns a problem without gradients that overflow. A step with such gradients is skipped, so these kernels never get
/// them. They would also cause NaNs, which have different bits on a GPU.
inline StepProblem finite_problem(std::size_t numel, Formats formats) {
  StepProblem problem(numel, 7, /*with_specials=*/true, formats);
  for (float& g : problem.gradient) {
    if (!(std::abs(g) < 1e15f)) g = std::signbit(g) ? -1e15f : 1e15f;
  }
  return problem;
}

/// Copies a problem's values to device memory and back.
struct DeviceProblem {
  explicit DeviceProblem(const StepProblem& p)
      : gradient(p.gradient), master(p.master), copy(p.copy), half(p.half), low(p.low) {
    for (std::size_t i = 0; i < kMostStates; ++i) {
      state.emplace_back(p.state[i]);
      scales.emplace_back(p.scales[i]);
    }
  }

  void read_back(StepProblem& p) const {
    p.master = master.values();
    p.copy = copy.values();
    p.half = half.values();
    p.low = low.values();
    for (std::size_t i = 0; i < kMostStates; ++i) {
      p.state[i] = state[i].values();
      p.scales[i] = scales[i].values();
    }
  }

  /// Returns the arguments of a kernel for elements [begin, end) of `problem`. This object was made from `problem`.
  DeviceRun run(const RuleOptimizer& optimizer, StepProblem& problem, std::size_t begin, std::size_t end) const {
    const OptimizerSlice slice = problem.slice(begin, end);
    DeviceRun run;
    run.rule = optimizer.rule();
    StepArguments& a = run.arguments;
    a = optimizer.arguments(slice);
    a.gradient = moved(a.gradient, problem.gradient, gradient);
    a.master = moved(a.master, problem.master, master);
    a.low = moved(a.low, problem.low, low);
    a.parameter = problem.formats.weights == WeightFormat::kF32AndF32
                      ? static_cast<void*>(moved(static_cast<float*>(a.parameter), problem.copy, copy))
                      : moved(static_cast<std::uint16_t*>(a.parameter), problem.half, half);
    for (StateArgument& argument : a.states) {
      for (std::size_t i = 0; i < kMostStates; ++i) {
        if (argument.data == nullptr || argument.data != slice.states[i].data.data()) continue;
        argument.data = moved(static_cast<std::byte*>(argument.data), problem.state[i], state[i]);
        argument.scales = moved(argument.scales, problem.scales[i], scales[i]);
        break;
      }
    }
    if (a.average.values != nullptr) {
      const std::size_t last = problem.formats.states.size() - 1;
      auto* const bytes = reinterpret_cast<std::byte*>(a.average.values);
      a.average.values = reinterpret_cast<float*>(moved(bytes, problem.state[last], state[last]));
    }
    run.stream = 5;
    run.first_element = begin;
    run.parameters = 1;
    run.begins = begins.data();
    return run;
  }

  Shared<ParameterBegin> begins{{{}}};
  Shared<float> gradient, master, copy;
  Shared<std::uint16_t> half;
  Shared<std::int16_t> low;
  std::vector<Shared<std::byte>> state;
  std::vector<Shared<float>> scales;

 private:
  /// Returns the pointer into `to` that has the offset of `pointer` in `from`.
  template <class T, class U>
  static T* moved(T* pointer, const std::vector<U>& from, const Shared<U>& to) {
    return pointer == nullptr ? nullptr : to.data() + (pointer - from.data());
  }
};

inline StepRequest request_of(const RuleOptimizer& optimizer, double lr, double microbatches = 1.0,
                              double max_norm = 0.0) {
  StepRequest request;
  request.rule = optimizer.rule();
  request.numbers = optimizer.numbers();
  request.microbatches = microbatches;
  request.max_norm = max_norm;
  request.base_lr = lr;
  for (double& ratio : request.lr_ratios) ratio = 1.0;
  return request;
}

inline StepDecision first_decision(float scale = 1.0f) {
  StepDecision decision{};
  decision.scaler.scale = scale;
  return decision;
}

/// A step over the parameters of some groups. A sum of squares decides whether the step is skipped.
struct QueuedStep {
  explicit QueuedStep(const std::vector<StepGroup>& groups = {{0, 1}}, float scale = 1.0f)
      : count(groups.back().first_parameter + groups.back().parameters),
        group(groups),
        decision({first_decision(scale)}) {
    tables.parameters = static_cast<int>(count);
    tables.groups = static_cast<int>(groups.size());
    tables.group = group.data();
    tables.norm.sum_of_squares = sum.data();
    tables.used = used.data();
    tables.is_uniform = uniform.data();
    tables.constants = constants.data();
    tables.steps = steps.data();
    tables.decision = decision.data();
  }
  /// Each microbatch has weight 1.
  void decide(const StepRequest& request) {
    StepDecision before = decision.values()[0];
    before.weight = request.microbatches;
    decision.set(0, before);
    check(cuda::decide_step(request, tables, nullptr));
  }

  const std::size_t count;
  Shared<StepGroup> group;
  Shared<double> sum{{1.0}};
  Shared<std::uint8_t> used{std::vector<std::uint8_t>(count, 1)}, uniform{std::vector<std::uint8_t>(16)};
  Shared<std::int64_t> steps{std::vector<std::int64_t>(count)};
  Shared<RuleConstants> constants{std::vector<RuleConstants>(count)};
  Shared<StepDecision> decision;
  StepTables tables;
};

}  // namespace
}  // namespace tessera
