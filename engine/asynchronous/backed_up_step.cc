#include "engine/asynchronous/backed_up_step.h"

#include <string>

#include "runtime/base/log.h"

namespace tessera {

BackedUpStep::BackedUpStep(const StepContext& context, GradientNorm& norm, FirstGradients& gradients)
    : LoneStep(context, norm, gradients), gradients_(gradients) {}

void BackedUpStep::run(const LocalStep& local, StepResult& result) {
  const LocalStep told = told_of(local);
  note_used();
  gradients_.offer(result.step, told, own_used_) ? take_part(told, result) : be_late(told, result);
  result.dropped = gradients_.dropped();
}

void BackedUpStep::take_part(const LocalStep& told, StepResult& result) {
  const AgreedStep& agreed = gradients_.sum(told);
  tell(agreed, gradients_.ranks_of_a_step(), result);
  FirstGradients::Counts done = gradients_.done();
  if (!result.overflow) {
    gradients_.update(rule(), {rates_for(agreed.weight, result), agreed.used});
    ++done.steps;
    done.samples += agreed.samples;
  } else if (gradients_.speaks()) {
    log_warning("step " + std::to_string(result.step) + ": a gradient is infinite or NaN; the step is skipped");
  }
  gradients_.end(done);
}

/// The numbers in `result` describe this rank alone.
void BackedUpStep::be_late(const LocalStep& told, StepResult& result) {
  const AgreedStep& own = decide_alone(told);
  tell(own, /*ranks=*/1, result);
  result.overflow = false;  // no step is skipped for an overflow in gradients that are dropped
  result.missed = gradients_.miss();
  result.step += result.missed - 1;
}

void BackedUpStep::resume(const StepProgress& progress) {
  gradients_.set_done({progress.applied, progress.samples});
  LoneStep::resume(progress);
}

}  // namespace tessera
