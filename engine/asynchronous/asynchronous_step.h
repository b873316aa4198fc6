#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "engine/asynchronous/common_parameters.h"
#include "engine/asynchronous/lone_step.h"

namespace tessera {

/// The step of a rank that waits for no other rank. The rank decides with its own loss and norm what the step does, and
/// pushes its gradients to the parameters that all ranks own. If several ranks are one replica, they have one loss,
/// norm and gradient together. Norm, clipping, schedule and skipped steps belong to this rank alone. The learning
/// rate is not divided by the number of ranks, although N updates are made when each of N ranks makes one step. If
/// workers come and go, the schedule of the learning rate follows the number of steps of all workers together.
class AsynchronousStep final : public LoneStep {
 public:
  /// Takes the arguments of LoneStep. It keeps a reference to `common`.
  AsynchronousStep(const StepContext& context, GradientNorm& norm, PushedParameters& common)
      : LoneStep(context, norm, common), common_(common) {}

  void expect_update(std::span<const int> order) override {
    LoneStep::expect_update(order);
    common_.begin_last_backward();
  }
  void reduced(const Unit& unit) override {
    LoneStep::reduced(unit);
    if (is_last_backward_) common_.reduced(unit);
  }
  void run(const LocalStep& local, StepResult& result) override;
  AgeHistogram ages() const override { return ages_; }

 private:
  PushedParameters& common_;
  AgeHistogram ages_;                  ///< ages in all steps so far
  std::optional<std::int64_t> begun_;  ///< steps made before this run; no value unless steps of all workers are counted
};

}  // namespace tessera
