// The part of a step that "noise_scale" needs: the squared norms of what this rank contributes to sums over ranks. They
// are the norms of this rank's microbatches if each microbatch is reduced by itself. It is the norm of this rank's sum
// if gradients are added up until the step's last microbatch. A job of one rank also measures the sum after each of the
// first microbatches. Such a sum is the gradient of a smaller batch.

#include "engine/training/training.h"

namespace tessera {

bool Training::measures_noise() const {
  const std::int64_t every = job.strategy.noise_scale.every;
  return every > 0 && (times.attempts + 1) % every == 0;
}

void Training::note_own_microbatch(double weight) {
  if (!measures_noise()) return;
  if (gradients.reducer->contributes_microbatches())
    window.local.own.add(gradients.reducer->take_own_square(), weight);
  else if (axes.world->size() == 1)
    window.local.own.add(gradients.reducer->take_own_square(), window.local.weight);
}

void Training::note_own_step() {
  if (!measures_noise() || gradients.reducer->contributes_microbatches() || axes.world->size() == 1) return;
  window.local.own.add(gradients.reducer->take_own_square(), window.local.weight);
}

}  // namespace tessera
