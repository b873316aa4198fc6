#include "optim/master_assigner.h"

namespace tessera {

OptimizerConfig sgd_without_states(const OptimizerConfig& config) {
  OptimizerConfig sgd = config;
  sgd.type = OptimizerType::kSgd;
  sgd.momentum = 0;
  sgd.state_dtype = StateDType::kF32;
  return sgd;
}

MasterAssigner::MasterAssigner(const OptimizerConfig& config, const EmaConfig& ema, InstructionSet set)
    : elements_(sgd_without_states(config), ema, set), loops_(step_loops(set)) {}

void MasterAssigner::read(const OptimizerSlice& slice, std::size_t begin, std::size_t count, float* masters) const {
  loops_.read_weights(part_of(elements_.arguments(slice), begin, count), masters);
}

void MasterAssigner::step(const StepScalars& scalars, const OptimizerSlice& slice) const {
  StepArguments a = elements_.arguments(slice);
  a.average.start = average_start(scalars.step, scalars.is_first_of_run);
  loops_.assign_weights(a);
}

}  // namespace tessera
