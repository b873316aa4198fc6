#include "engine/asynchronous/asynchronous_step.h"

#include <string>

#include "runtime/base/log.h"

namespace tessera {

void AsynchronousStep::run(const LocalStep& local, StepResult& result) {
  if (const auto steps = common_.steps_of_all()) {
    if (!begun_) begun_ = applied_;
    applied_ = *begun_ + *steps;
  }
  LocalStep told = told_of(local);
  note_used();
  common_.sum_over_replica(told, own_used_);
  if (common_.ranks_of_replica() > 1) forget_norm();
  const AgreedStep& own = decide_alone(told);
  tell(own, common_.ranks_of_replica(), result);
  if (result.overflow) {
    log_warning("step " + std::to_string(result.step) +
                ": a gradient is infinite or NaN; this rank skips the step, and others go on");
    return common_.skip();
  }
  const GradientAges ages = common_.push(rule(), {rates_for(own.weight, result), own_used_, told.rates, told.options});
  result.staleness_mean = ages.mean();
  result.staleness_max = ages.most;
  result.ages = ages.histogram;
  ages_.add(ages.histogram);
  ++applied_;
  samples_ += own.samples;
}

}  // namespace tessera
