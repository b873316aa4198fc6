#include "optim/loss_scaler.h"

namespace tessera {

LossScaler::LossScaler(const LossScaleConfig& config)
    : rule_{.growth_factor = config.growth_factor,
            .backoff_factor = config.backoff_factor,
            .minimum = config.minimum,
            .growth_interval = config.growth_interval,
            .hysteresis = config.hysteresis,
            .dynamic = config.dynamic},
      state_{.scale = static_cast<float>(config.initial)} {}

}  // namespace tessera
