#include "optim/adamw.h"

#include "optim/optimizer_checks.h"

namespace tessera {

AdamW::AdamW(const OptimizerConfig& config, InstructionSet set) : config_(config), loops_(&step_loops(set)) {}

std::string AdamW::state_name(int index) const { return index == 0 ? "exp_avg" : "exp_avg_sq"; }

AdamHyperparameters AdamW::hyperparameters() const {
  return {.beta1 = config_.beta1,
          .beta2 = config_.beta2,
          .eps = config_.eps,
          .weight_decay = config_.weight_decay,
          .decoupled = config_.type == OptimizerType::kAdamW};
}

void AdamW::step(const StepScalars& scalars, const OptimizerSlice& slice) const {
  const char* name = config_.type == OptimizerType::kAdamW ? "adamw" : "adam";
  const AdamConstants constants = adam_constants(hyperparameters(), scalars.step, scalars.lr, scalars.gradient_scale);
  loops_->adam(constants, check_slice(name, num_states(), config_.state_dtype, scalars.step, slice));
}

}  // namespace tessera
