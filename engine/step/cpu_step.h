#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/replay/step_recorder.h"
#include "engine/step/agree/gradient_norm.h"
#include "engine/step/agree/straggler_watch.h"
#include "engine/step/step.h"
#include "engine/step/update.h"
#include "optim/arithmetic/step_decision.h"

namespace tessera {

/// The step of an Engine on the CPU: when `run` returns, parameters are updated and all fields of the result are known.
class CpuStep final : public Step {
 public:
  /// `norm` gets the gradients that `context.reducer` makes.
  CpuStep(const StepContext& context, GradientNorm& norm);

  LossSeed seed_of(const at::Tensor& loss, double weight) const override;
  void add_loss(const at::Tensor& loss, double weight, std::int64_t round) override;
  void expect_update(std::span<const int> order) override { update_.expect(order); }
  void read_ahead() override;
  void deal(const MicrobatchOrder& order) override;
  std::span<const double> busy_seconds() const override { return agreed_.busy_seconds; }
  void update(Unit& unit, const UnitAgreement& agreed) override;
  void run(const LocalStep& local, StepResult& result) override;
  void set_lr(double lr, std::optional<std::size_t> group) override { update_.learning_rates().set(lr, group); }
  double lr(std::optional<std::size_t> group) const override;
  UpdateOptions& options() override { return update_.options(); }
  void swap_averages() override { update_.swap_averages(); }
  void pass_over_loss() override;
  void forget_losses() override;
  const std::vector<char>* known_used() const override { return agreed_.used; }
  double loss_scale() const override { return scales_loss_ ? latest_.scaler.scale : 1.0; }
  std::int64_t applied() const override { return latest_.so_far.applied; }
  std::int64_t samples_seen() const override { return latest_.so_far.samples; }
  StepProgress progress() const override;
  void resume(const StepProgress& progress) override;
  double communication_seconds() const override;

 private:
  /// Parts of the latest AgreedStep, which `StepAgreement` owns.
  struct Agreed {
    const std::vector<char>* used = nullptr;
    std::span<const double> busy_seconds;
  };
  /// Losses of the step under way.
  struct Losses {
    double sum = 0;                         ///< LocalStep::loss so far
    std::vector<MicrobatchLoss> of_rounds;  ///< [round]; empty unless Strategy::reproducible is set
  };

  /// Returns the schedule's ratio for the next step.
  double lr_ratio() const;

  /// Decides the step, and writes the decision into `latest_`. Warns of a spike. Throws as `run` does.
  void decide(const AgreedStep& agreed, std::int64_t step);
  /// Returns a text that names the parameters whose gradients are not finite.
  std::string not_finite(const AgreedStep& agreed) const;

  const Strategy& strategy_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  const bool speaks_;     ///< whether this rank logs for all ranks
  const int first_rank_;  ///< StepContext::first_rank
  GradientNorm& norm_;
  DecisionRule rule_;  ///< its rate and warm-up are those of the latest step
  const double each_;  ///< microbatches of a step on one rank, on average
  const bool scales_loss_;
  StepAgreement agreement_;
  StragglerWatch stragglers_;
  Update update_;
  std::optional<LossSpikes> spikes_;  ///< the window of losses; empty without Strategy::on_spike
  StepDecision latest_;               ///< decision of the latest step
  Agreed agreed_;
  Losses losses_;
  std::unique_ptr<StepRecorder> recorder_;  ///< null if no hashes are wanted
};

}  // namespace tessera
