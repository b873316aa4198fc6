// This file has the part of a step that "noise_scale" needs: the squared norms of this rank's contributions to sums
// over ranks. If each microbatch is reduced by itself, a contribution is the gradient of one microbatch. If gradients
// are added up until the step's last microbatch, a contribution is the sum over this rank's microbatches. A job of one
// rank then measures the sum after each microbatch. Before the last microbatch, such a sum is the gradient of a smaller
// batch.

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
