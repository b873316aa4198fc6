#include "optim/muon_optimizer.h"

namespace tessera {
namespace {

OptimizerConfig sgd_with_states_of(const OptimizerConfig& config) {
  OptimizerConfig sgd = config;
  sgd.type = OptimizerType::kSgd;
  sgd.momentum = config.muon.momentum;
  return sgd;
}

}  // namespace

MuonOptimizer::MuonOptimizer(const OptimizerConfig& config, const EmaConfig& ema, InstructionSet set)
    : elements_(sgd_with_states_of(config), ema, set), loops_(step_loops(set)) {
  set_numbers(config);
}

void MuonOptimizer::set_numbers(const OptimizerConfig& config) {
  momentum_ = {.momentum = config.muon.momentum, .is_nesterov = config.muon.nesterov};
  step_ = {.weight_decay = config.weight_decay, .is_decoupled = true};
}

StepArguments MuonOptimizer::direction_arguments(const OptimizerSlice& slice, std::span<float> direction) const {
  OptimizerSlice as_if = slice;  // the directions are written where masters would be, since masters may not be in
                                 // memory
  as_if.master_kind = MasterKind::kF32;
  as_if.master = direction;
  as_if.low = {};
  as_if.parameter = nullptr;
  StepArguments a = elements_.arguments(as_if);
  a.average = {};
  return a;
}

StepArguments MuonOptimizer::step_arguments(const OptimizerSlice& slice) const {
  StepArguments a = elements_.arguments(slice);
  a.states[0] = {};
  return a;
}

/// Returns Muon's constants, which are the same in all steps.
MuonMomentumConstants MuonOptimizer::momentum_constants() const {
  return MuonMomentumRule::constants(momentum_, /*step=*/1, /*lr=*/0);
}

void MuonOptimizer::direction(const StepScalars& scalars, const OptimizerSlice& slice,
                              std::span<float> direction) const {
  StepArguments a = direction_arguments(slice, direction);
  a.gradient_scale = scalars.gradient_scale;
  a.clip_value = scalars.clip_value;
  a.noise = noise_key(slice.stream, scalars.step);
  loops_.muon_direction(momentum_constants(), a);
}

void MuonOptimizer::step(const StepScalars& scalars, const OptimizerSlice& slice) const {
  StepArguments a = step_arguments(slice);
  a.average.start = average_start(scalars.step, scalars.is_first_of_run);
  loops_.update[static_cast<int>(StepRule::kSgd)](rule_constants(StepRule::kSgd, step_, scalars.step, scalars.lr), a);
}

}  // namespace tessera
