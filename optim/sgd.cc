#include "optim/sgd.h"

#include <stdexcept>

#include "optim/optimizer_checks.h"

namespace tessera {

Sgd::Sgd(const OptimizerConfig& config, InstructionSet set) : config_(config), loops_(&step_loops(set)) {
  if (config.state_dtype == StateDType::k8Bit) throw std::invalid_argument("sgd: 8-bit states are adam's and adamw's");
}

SgdConstants Sgd::constants() const {
  SgdConstants c{};
  c.l2 = static_cast<float>(config_.weight_decay);
  c.momentum = static_cast<float>(config_.momentum);
  c.one_minus_dampening = static_cast<float>(1.0 - config_.dampening);
  c.has_momentum = num_states() == 1;
  c.nesterov = config_.nesterov;
  return c;
}

void Sgd::step(const StepScalars& scalars, const OptimizerSlice& slice) const {
  const StepArguments arguments = check_slice("sgd", num_states(), config_.state_dtype, scalars.step, slice);
  SgdConstants c = constants();
  c.gradient_scale = scalars.gradient_scale;
  c.lr = scalars.lr;
  c.first_step = scalars.step <= 1;
  loops_->sgd(c, arguments);
}

}  // namespace tessera
