#include "optim/loss_scaler.h"

#include <algorithm>
#include <cmath>

namespace tessera {

LossScaler::LossScaler(const LossScaleConfig& config)
    : config_(config), state_{.scale = static_cast<float>(config.initial)} {}

void LossScaler::update(bool overflow) {
  if (!config_.dynamic) return;
  if (overflow) {
    state_.finite_steps = 0;
    if (++state_.overflow_steps >= config_.hysteresis) back_off();
    return;
  }
  state_.overflow_steps = 0;
  if (++state_.finite_steps == config_.growth_interval) {
    state_.finite_steps = 0;
    grow();
  }
}

void LossScaler::back_off() {
  const double smaller = std::max(state_.scale * config_.backoff_factor, config_.minimum);
  state_.scale = std::min(state_.scale, static_cast<float>(smaller));  // a scale below the minimum is not raised to it
}

void LossScaler::grow() {
  const auto larger = static_cast<float>(state_.scale * config_.growth_factor);
  if (std::isfinite(larger)) state_.scale = larger;
}

}  // namespace tessera
