#pragma once

// See docs/glossary.md: agreement.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/asynchronous/common_parameters.h"
#include "engine/step/agree/gradient_norm.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/step_agreement.h"
#include "engine/step/agree/step_context.h"
#include "engine/step/agree/update_options.h"
#include "engine/step/rules/element_update.h"
#include "engine/step/step.h"

namespace tessera {

/// The step of a rank that waits for nobody: it decides by its own loss and norm, and pushes its gradients to the
/// parameters that all ranks own. Norm, clipping, schedule and skipped steps are this rank's alone; the learning rate
/// is not divided by the number of ranks, though a round of N ranks makes N updates.
class AsynchronousStep final : public Step {
 public:
  /// `context.axes`: of this rank alone. `norm` sees the gradients that `context.reducer` makes.
  AsynchronousStep(const StepContext& context, GradientNorm& norm, CommonParameters& common);

  LossSeed seed_of(const at::Tensor& loss, double weight) const override;
  void add_loss(const at::Tensor& loss, double weight, std::int64_t round) override;
  void expect_update(std::span<const int>) override {}
  void update(Unit& unit, const UnitAgreement& agreed) override;
  void run(const LocalStep& local, StepResult& result) override;
  void set_lr(double lr, std::optional<std::size_t> group) override { rates_.set(lr, group); }
  double lr(std::optional<std::size_t> group) const override;
  UpdateOptions& options() override { return options_; }
  void swap_averages() override;
  void forget_losses() override { loss_ = 0; }
  const std::vector<char>* known_used() const override { return used_; }
  double loss_scale() const override { return 1.0; }
  std::int64_t applied() const override { return applied_; }
  StepProgress progress() const override;
  /// Collective: nobody pushes before all have their counts.
  void resume(const StepProgress& progress) override;
  double communication_seconds() const override { return common_.communication_seconds(); }

 private:
  const Strategy& strategy_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  CommonParameters& common_;
  const double microbatches_;  ///< a step's, on this rank
  StepAgreement agreement_;    ///< with nobody: it adds up the norm
  LearningRates rates_;
  UpdateOptions options_;
  std::uint64_t followed_ = 0;  ///< the options' version that `elements_` has
  ElementUpdate elements_;
  std::int64_t applied_ = 0;
  const std::vector<char>* used_ = nullptr;  ///< points into the agreement
  double loss_ = 0;
};

}  // namespace tessera
