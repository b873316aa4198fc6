#pragma once

#include <cstdint>

#include "engine/asynchronous/first_gradients.h"
#include "engine/asynchronous/lone_step.h"

namespace tessera {

/// A step that sums the gradients of the ranks whose gradients are ready first ("sync" backups). These ranks together
/// have one loss and one norm, and clip and skip together. A rank that is too late drops its gradients, and continues
/// after the newest step.
class BackedUpStep final : public LoneStep {
 public:
  /// Takes the arguments of LoneStep. It keeps a reference to `gradients`.
  BackedUpStep(const StepContext& context, GradientNorm& norm, FirstGradients& gradients);

  void run(const LocalStep& local, StepResult& result) override;
  /// Returns the number of steps that have updated parameters, as far as this rank knows.
  std::int64_t applied() const override { return gradients_.done().steps; }
  std::int64_t samples_seen() const override { return gradients_.done().samples; }
  void resume(const StepProgress& progress) override;

 private:
  void take_part(const LocalStep& told, StepResult& result);
  void be_late(const LocalStep& told, StepResult& result);

  FirstGradients& gradients_;
};

}  // namespace tessera
