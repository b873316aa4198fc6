#include "optim/layerwise_optimizer.h"

#include "optim/trust_ratio.h"
#include "runtime/config/optimizer_rows.h"

namespace tessera {
namespace {

constexpr bool adapts_rates(OptimizerType type) {
  using namespace optimizer_traits;
  switch (type) {
#define TESSERA_CASE(enumerator, word, text, traits, ...) \
  case OptimizerType::enumerator:                         \
    return ((traits)&kLayers) != 0;
    TESSERA_OPTIMIZER_TYPES(TESSERA_CASE)
#undef TESSERA_CASE
  }
  return false;
}

template <class Rule>
constexpr bool kSaysRatio = requires {
  &Rule::trust_ratio;
};

// A rule whose rate depends on norms must have trust_ratio, since otherwise its rate would not be adapted.
#define TESSERA_CHECK(enumerator, Rule)                                       \
  static_assert(!adapts_rates(OptimizerType::enumerator) || kSaysRatio<Rule>, \
                "a rule whose row has kLayers needs trust_ratio (optim/rules/rule.h)");
TESSERA_STEP_RULES(TESSERA_CHECK)
#undef TESSERA_CHECK

}  // namespace

LayerwiseOptimizer::LayerwiseOptimizer(const OptimizerConfig& config, const EmaConfig& ema, InstructionSet set)
    : elements_(config, ema, set), trust_coefficient_(config.trust_coefficient), loops_(step_loops(set)) {}

StepArguments LayerwiseOptimizer::arguments(const StepScalars& scalars, const OptimizerSlice& slice) const {
  StepArguments a = elements_.arguments(slice);
  a.gradient_scale = scalars.gradient_scale;
  a.clip_value = scalars.clip_value;
  a.noise = noise_key(slice.stream, scalars.step);
  a.average.start = average_start(scalars.step, scalars.is_first_of_run);
  return a;
}

void LayerwiseOptimizer::read(const StepScalars& scalars, StepArguments piece, float* weights,
                              float* directions) const {
  loops_.read_weights(piece, weights);
  if (!makes_directions()) return;
  std::copy_n(weights, piece.numel, directions);
  piece.weights = WeightFormat::kF32;
  piece.master = directions;
  piece.average = {};
  update_by(elements_.rule(), elements_.numbers(), scalars, piece);
}

double LayerwiseOptimizer::trust_ratio(double weights_norm, double update_norm) const {
  return tessera::trust_ratio(elements_.rule(), elements_.numbers(), trust_coefficient_, weights_norm, update_norm);
}

void LayerwiseOptimizer::step(const StepScalars& scalars, const OptimizerSlice& slice) const {
  step(scalars, slice, 0, slice.gradient.size());
}

void LayerwiseOptimizer::step(const StepScalars& scalars, const OptimizerSlice& slice, std::size_t begin,
                              std::size_t count) const {
  StepArguments a = part_of(arguments(scalars, slice), begin, count);
  if (!makes_directions()) return update_by(elements_.rule(), elements_.numbers(), scalars, a);
  a.gradient_scale = 1;
  a.clip_value = 0;
  for (StateArgument& state : a.states) state = {};
  update_by(StepRule::kSgd, RuleNumbers{}, scalars, a);
}

void LayerwiseOptimizer::update_by(StepRule rule, const RuleNumbers& numbers, const StepScalars& scalars,
                                   const StepArguments& a) const {
  loops_.update[static_cast<int>(rule)](rule_constants(rule, numbers, scalars.step, scalars.lr), a);
}

}  // namespace tessera
