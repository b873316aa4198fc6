#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/replay/step_recorder.h"
#include "engine/step/agree/gradient_norm.h"
#include "engine/step/agree/straggler_watch.h"
#include "engine/step/step.h"
#include "engine/step/update.h"
#include "optim/loss_scaler.h"

namespace tessera {

/// The step of an Engine on the CPU: when `run` returns, parameters are updated and all fields of the result are known.
class CpuStep final : public Step {
 public:
  /// `norm` sees the gradients that `context.reducer` makes.
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
  double loss_scale() const override { return scales_loss_ ? scaler_.scale() : 1.0; }
  std::int64_t applied() const override { return done_.applied; }
  std::int64_t samples_seen() const override { return done_.samples; }
  StepProgress progress() const override;
  void resume(const StepProgress& progress) override;
  double communication_seconds() const override;

 private:
  /// Counts of the steps that were made.
  struct Done {
    std::int64_t applied = 0;
    std::int64_t samples = 0;  ///< samples_seen
    std::int64_t batch = 0;    ///< samples of the latest step, over all replicas
  };
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

  /// Returns the rate of a step with `samples` samples of this replica.
  double scheduled_lr(std::int64_t samples) const;
  /// Counts a step that was applied.
  void count_step() { ++done_.applied, done_.samples += done_.batch; }
  Update::Rates rates(double gradient_scale, double lr) const;

  /// Returns whether a step without an overflow is to be skipped because of its loss.
  bool is_spike(const StepResult& result);
  /// Writes what is known of the gradients' noise after this step.
  void measure_noise(const AgreedStep& agreed, StepResult& result);
  /// Returns a text that names the parameters whose gradients are not finite.
  std::string not_finite(const AgreedStep& agreed) const;

  const Strategy& strategy_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  const bool speaks_;     ///< whether this rank logs for all ranks
  const int first_rank_;  ///< StepContext::first_rank
  GradientNorm& norm_;
  const double microbatches_, each_;  ///< microbatches of a step: on all ranks, and on one rank on average
  const bool scales_loss_;
  StepAgreement agreement_;
  StragglerWatch stragglers_;
  Update update_;
  LossScaler scaler_;
  std::optional<LossSpikes> spikes_;  ///< empty without Strategy::on_spike
  NoiseScale noise_;
  const std::int64_t replicas_;  ///< StepContext::replicas
  Done done_;
  Agreed agreed_;
  Losses losses_;
  std::unique_ptr<StepRecorder> recorder_;  ///< null if no hashes are wanted
};

}  // namespace tessera
