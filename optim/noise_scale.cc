#include "optim/noise_scale.h"

namespace tessera {

bool NoiseScale::add(const Step& step) {
  return add_noise(smoothing_,
                   {.own_squares = step.own.squares,
                    .own_weights = step.own.weights,
                    .own_weight_squares = step.own.weight_squares,
                    .square = step.square,
                    .weight = step.weight,
                    .batch = step.batch,
                    .loss_scale = step.loss_scale},
                   state_);
}

}  // namespace tessera
