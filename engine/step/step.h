#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "engine/step/agree/loss_seed.h"
#include "engine/step/agree/loss_spikes.h"
#include "engine/step/agree/step_agreement.h"
#include "engine/step/agree/update_options.h"
#include "optim/arithmetic/loss_scale_rule.h"
#include "optim/arithmetic/noise_rule.h"
#include "sharding/reduce/pack/gradient_squares.h"
#include "sharding/unit_agreement.h"
#include "tessera/engine.h"

namespace tessera {

/// The progress of training: the data that a step needs from earlier steps, apart from parameters and optimizer states.
struct StepProgress {
  std::int64_t applied = 0;
  LossScalerState scaler;
  std::map<const c10::TensorImpl*, std::int64_t> updates;  ///< number of steps that updated each trainable parameter
  std::vector<double> rates;                               ///< rates set by hand: the common rate, then the groups'
                                                           ///< rates
  std::vector<double> options;                             ///< UpdateOptions::all
  SpikeHistory losses = {};                                ///< empty without Strategy::on_spike
  NoiseState noise = {};                                   ///< zeros without Strategy::noise_scale
  std::int64_t samples = 0;                                ///< Engine::samples_seen
};

/// The largest power of two that fp16 holds.
constexpr double kMostFp16Seed = 32768;

/// Does the work of a step from the losses of its microbatches to the updated parameters. The Engine owns it and calls
/// it from the thread that trains. CpuStep works while the caller waits; QueuedStep queues everything on a GPU. In both
/// classes, ranks exchange the same numbers, make decisions by the same rules, and get the same bits.
class Step {
 public:
  virtual ~Step() = default;

  /// Returns the loss scale times `weight` (weigh), for a loss of one element. If the loss is fp16, the part of the
  /// scale above kMostFp16Seed goes into LossSeed::factor.
  virtual LossSeed seed_of(const at::Tensor& loss, double weight) const = 0;

  /// Adds `weight` times `loss` to the step's loss, which is the mean over this rank's microbatches. `round`: number of
  /// the microbatch, from 0.
  virtual void add_loss(const at::Tensor& loss, double weight, std::int64_t round) = 0;

  /// Tells the step which rank computes which microbatches from the next step on ("deal" by speed).
  virtual void deal(const MicrobatchOrder&) {}
  /// Returns [rank] the seconds for which each rank was busy in the last step, as ranks agreed
  /// (LocalStep::busy_seconds). It is valid until the next step, and empty if the host does not know these times.
  virtual std::span<const double> busy_seconds() const { return {}; }

  /// It is called after a loss that does not count: its weight is 0 (the loss may then be NaN), or another rank has
  /// made the microbatch first. It is also called after parameters got other values.
  virtual void pass_over_loss() {}

  /// It is called when a step's last backward begins. `order`: indices of the units, in the order of their reductions.
  virtual void expect_update(std::span<const int> order) = 0;

  /// It is called between updates in backward. It reads ahead the state on disk that the next updates need, as far as
  /// there is memory.
  virtual void read_ahead() {}

  /// It is called when the sum of a unit's gradients in this backward is complete, or queued, and again if a gradient
  /// came later (Reducer::OnReduced).
  virtual void reduced(const Unit&) {}

  /// Updates `unit` in backward, directly after its gradients are summed (Reducer::OnSummed). Throws tessera::Error: 65
  /// if a gradient is not finite; 70 if ranks gathered units in different orders. If this is known only later,
  /// StepResult::wait throws the error.
  virtual void update(Unit& unit, const UnitAgreement& agreed) = 0;

  /// Agrees with the other ranks, decides (overflow, spike, clip, learning rate) and updates. Fills in the fields of
  /// `result` that are known when it returns. It is collective. Throws tessera::Error: 70 if ranks gathered units in
  /// different orders; 78 if a loss is negative, with Strategy::on_spike.
  virtual void run(const LocalStep& local, StepResult& result) = 0;

  /// Sets the rate of a group. If `group` is empty, it sets the common rate, and the rate of each group is again its
  /// share of the common rate.
  virtual void set_lr(double lr, std::optional<std::size_t> group) = 0;

  /// Returns the rate of the next step, of a group or of all parameters, before lr_schedule.base_batch_size scales it.
  /// While the rate rises over samples, the next step is assumed to have as many samples as the latest step.
  virtual double lr(std::optional<std::size_t> group) const = 0;

  /// Returns the numbers of the update rule. Changes take effect in the next step.
  virtual UpdateOptions& options() = 0;

  /// Exchanges parameters and their averages (Strategy::ema) if a step has updated them, and makes the new values known
  /// to all ranks. It is collective.
  virtual void swap_averages() = 0;

  /// Returns the object that squares this rank's own gradients on a GPU. It is null unless "noise_scale" is set and a
  /// GPU trains.
  virtual GradientSquares* own_squares() { return nullptr; }

  /// Drops the losses added since the last `run`.
  virtual void forget_losses() = 0;

  /// Returns for each trainable parameter whether some rank used the parameter. The parameters are in the order of
  /// units, of groups in a unit, and of the layout in a group. The result belongs to the latest step whose result is
  /// known on every rank. It is null before the first such step. All ranks get the same result.
  virtual const std::vector<char>* known_used() const = 0;

  /// Returns the loss scale of the next backward.
  virtual double loss_scale() const = 0;
  /// Returns the number of steps that updated parameters.
  virtual std::int64_t applied() const = 0;
  /// Returns the number of samples in the steps that updated parameters: see Engine::samples_seen.
  virtual std::int64_t samples_seen() const = 0;
  virtual StepProgress progress() const = 0;
  /// Continues from `progress`. Parameters without an entry begin anew.
  virtual void resume(const StepProgress& progress) = 0;

  /// Returns the seconds spent in the collectives of steps so far, as far as the host knows.
  virtual double communication_seconds() const = 0;
  /// Returns how often this rank's gradients had each age so far (Engine::staleness).
  virtual AgeHistogram ages() const { return {}; }
  /// Returns the bytes of records that were copied to a GPU so far (TrafficCounts::streamed_bytes).
  virtual std::int64_t streamed_bytes() const { return 0; }
  /// Returns TrafficCounts::host_step.
  virtual HostStepBytes host_step() const { return {}; }
};

}  // namespace tessera
