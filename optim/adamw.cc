#include "optim/adamw.h"

#include <cmath>

#include "optim/optimizer_checks.h"

namespace tessera {

AdamW::AdamW(const OptimizerConfig& config, InstructionSet set) : config_(config), loops_(&step_loops(set)) {}

std::string AdamW::state_name(int index) const { return index == 0 ? "exp_avg" : "exp_avg_sq"; }

AdamConstants AdamW::constants(const StepScalars& scalars) const {
  const double correction1 = 1.0 - power(config_.beta1, scalars.step);
  const double root2 = std::sqrt(1.0 - power(config_.beta2, scalars.step));
  const double lr = scalars.lr;
  const bool decoupled = config_.type == OptimizerType::kAdamW;
  return AdamConstants{
      .gradient_scale = scalars.gradient_scale,
      .l2 = static_cast<float>(config_.weight_decay),
      .decay = static_cast<float>(1.0 - lr * config_.weight_decay),
      .one_minus_beta1 = static_cast<float>(1.0 - config_.beta1),
      .beta2 = static_cast<float>(config_.beta2),
      .one_minus_beta2 = static_cast<float>(1.0 - config_.beta2),
      .step_size = static_cast<float>(lr * root2 / correction1),
      .eps = static_cast<float>(config_.eps * root2),
      .decoupled = decoupled,
  };
}

void AdamW::step(const StepScalars& scalars, const OptimizerSlice& slice) const {
  const char* name = config_.type == OptimizerType::kAdamW ? "adamw" : "adam";
  loops_->adam(constants(scalars), check_slice(name, num_states(), config_.state_dtype, scalars.step, slice));
}

}  // namespace tessera
