#include "optim/sgd.h"

#include <stdexcept>

#include "optim/optimizer_checks.h"

namespace tessera {

Sgd::Sgd(const OptimizerConfig& config, InstructionSet set) : config_(config), loops_(&step_loops(set)) {
  if (config.state_dtype == StateDType::k8Bit) throw std::invalid_argument("sgd: 8-bit states are adam's and adamw's");
}

void Sgd::step(const StepScalars& scalars, const OptimizerSlice& slice) const {
  const StepArguments arguments = check_slice("sgd", num_states(), config_.state_dtype, scalars.step, slice);
  const SgdConstants constants{
      .gradient_scale = scalars.gradient_scale,
      .l2 = static_cast<float>(config_.weight_decay),
      .momentum = static_cast<float>(config_.momentum),
      .one_minus_dampening = static_cast<float>(1.0 - config_.dampening),
      .lr = scalars.lr,
      .has_momentum = num_states() == 1,
      .first_step = scalars.step <= 1,
      .nesterov = config_.nesterov,
  };
  loops_->sgd(constants, arguments);
}

}  // namespace tessera
