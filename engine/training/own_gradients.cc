// The part of a step that "noise_scale" needs: the squared norms of what this rank contributes to sums over ranks.
// Where each microbatch is reduced, those are its microbatches' norms. Where gradients are added up until the step's
// last microbatch, it is the norm of this rank's sum. A single rank also knows the sum after each of its first
// microbatches, which is a smaller batch than all of them.

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
