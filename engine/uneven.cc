#include "tessera/uneven.h"

#include "engine/engine_state.h"

namespace tessera {

bool UnevenLoop::next(bool has_batch) {
  const auto any_rank_has_batch = [&] {
    Training& training = engine_.state_->training;  // a step may have replaced the Training
    return training.job.or_abort("uneven", [&] { return training.any_rank_has_batch(has_batch); });
  };
  while (any_rank_has_batch()) {
    if (has_batch) return true;
    engine_.backward_nothing();
    if (engine_.step_is_due()) step(/*partial=*/false);
  }
  if (engine_.state_->training.window.microbatch > 0) step(/*partial=*/true);
  return false;
}

void UnevenLoop::step(bool partial) {
  const StepResult result = engine_.step(partial);
  if (on_step_) on_step_(result);
}

}  // namespace tessera
