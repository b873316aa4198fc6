#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/asynchronous/common_parameters.h"
#include "engine/asynchronous/host_copies.h"
#include "engine/asynchronous/shard_rule.h"
#include "engine/step/agree/gradient_norm.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/step_agreement.h"
#include "engine/step/agree/step_context.h"
#include "engine/step/agree/update_options.h"
#include "engine/step/step.h"

namespace tessera {

/// The base class of the steps of ranks with common parameters. Each rank has its own loss, gradients and norm, and the
/// numbers of the update rule. A derived class uses the gradients in `run`: AsynchronousStep pushes them, and
/// BackedUpStep offers them to a step of several ranks.
class LoneStep : public Step {
 public:
  LossSeed seed_of(const at::Tensor& loss, double weight) const override;
  void add_loss(const at::Tensor& loss, double weight, std::int64_t round) override;
  void expect_update(std::span<const int> order) override;
  void reduced(const Unit& unit) override;
  void update(Unit& unit, const UnitAgreement& agreed) override;
  void set_lr(double lr, std::optional<std::size_t> group) override { rates_.set(lr, group); }
  double lr(std::optional<std::size_t> group) const override;
  UpdateOptions& options() override { return options_; }
  void swap_averages() override;
  void forget_losses() override { loss_ = 0; }
  const std::vector<char>* known_used() const override { return used_; }
  double loss_scale() const override { return 1.0; }
  std::int64_t applied() const override { return applied_; }
  std::int64_t samples_seen() const override { return samples_; }
  StepProgress progress() const override;
  /// It is collective: no rank continues before all ranks have written how often each parameter was updated.
  void resume(const StepProgress& progress) override;
  double communication_seconds() const override { return common_.communication_seconds(); }

 protected:
  /// `context.axes`: the axes of a mesh of this rank alone. On the CPU, `norm` gets the gradients that
  /// `context.reducer` makes.
  LoneStep(const StepContext& context, GradientNorm& norm, CommonParameters& common);

  /// Begins the step: returns `local` with the loss so far and the numbers of the rule. The loss so far is set back
  /// to 0. The function waits until a GPU's gradients are on the host.
  LocalStep told_of(const LocalStep& local);
  /// Clears the norm. It is called if gradients have changed since their sums were added to the norm.
  void forget_norm() { norm_.reset(); }
  /// Returns the numbers by which this rank alone would decide. The function reads all gradients.
  const AgreedStep& decide_alone(const LocalStep& told);
  /// Writes into `result` the loss, the norm, the learning rate, and whether the gradients are finite. `ranks`: the
  /// number of ranks whose losses are in `agreed`.
  void tell(const AgreedStep& agreed, std::int64_t ranks, StepResult& result) const;
  /// Returns the learning rates for an update with gradients whose sum has this `weight`.
  UpdateRates rates_for(double weight, const StepResult& result) const;
  /// Returns the rule with this step's options.
  const ShardRule& rule();
  /// Fills in `own_used_`, which `known_used` returns from then on.
  void note_used();

  const Strategy& strategy_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  std::int64_t applied_ = 0;
  std::int64_t samples_ = 0;                 ///< samples_seen
  const std::vector<char>* used_ = nullptr;  ///< known_used
  std::vector<char> own_used_;               ///< [trainable parameter]: whether it has a gradient of this rank
  bool is_last_backward_ = false;            ///< whether the present backward is the last one of its step

 private:
  CommonParameters& common_;
  HostCopies* const copies_;  ///< null on the CPU, where gradients lie where backward writes them
  GradientNorm& norm_;
  const Reducer& reducer_;
  const double microbatches_;  ///< microbatches of a step on one rank
  StepAgreement agreement_;    ///< adds up the norm, for this rank alone
  LearningRates rates_;
  UpdateOptions options_;
  std::uint64_t followed_ = 0;  ///< UpdateOptions::version of the options that `rule_` uses
  ShardRule rule_;
  double loss_ = 0;
};

}  // namespace tessera
