#pragma once

// See docs/glossary.md: unit.

#include <math.h>

#include <cstdint>

#include "optim/arithmetic/clip.h"
#include "optim/arithmetic/instruction_set.h"
#include "optim/arithmetic/loss_scale_rule.h"
#include "optim/arithmetic/noise_rule.h"
#include "optim/arithmetic/scaled_lr.h"
#include "optim/arithmetic/spike_rule.h"
#include "optim/arithmetic/weighted_mean.h"

namespace tessera {

// These functions make the decision about a step. Every rank makes it from the numbers on which all ranks agree.
// CpuStep calls these functions on the host. If a GPU trains, its kernels call them (optim/cuda/device_step.cu). The
// results therefore have the same bits on host and GPU, and skips, counts, loss scale, spikes and noise are handled in
// the same order.

/// The part of a step's loss that one microbatch adds. If "reproducible" is set, a rank sends this part to the other
/// ranks. If a GPU trains, the device writes it.
struct MicrobatchLoss {
  double loss = 0.0;    ///< weight * loss, over all losses of the microbatch
  double weight = 0.0;  ///< MicrobatchInfo::weight; 0 where this rank had no batch
};

/// Sums over ranks, added in rank order.
struct AgreedSums {
  double loss = 0.0;    ///< sum of LocalStep::loss, divided by the number of ranks; a decision replaces it by mean_loss
  double weight = 0.0;  ///< sum of the weights of all microbatches
  std::int64_t tokens = 0, samples = 0;
};

/// Adds the sums of one rank. `message` is a header that has the four numbers. `ranks` is the number of all ranks.
template <class Header>
TESSERA_ALWAYS_INLINE void add_rank(AgreedSums& sums, const Header& message, int ranks) {
  sums.loss += message.loss / ranks;
  sums.weight += message.weight;
  sums.tokens += message.tokens;
  sums.samples += message.samples;
}

/// The steps that a run has made so far.
struct StepsSoFar {
  std::int64_t applied = 0, skipped = 0;
  std::int64_t samples = 0;  ///< samples of the applied steps, over all replicas
};

/// The decision about a step, and the state from earlier steps that it needs. Before the first step all fields are
/// zero, except the scaler.
struct StepDecision : AgreedSums {
  double grad_norm = 0.0;  ///< norm of the mean gradient, before clipping
  double lr = 0.0;
  OwnGradients own;                 ///< sums over ranks in rank order
  float gradient_scale = 0.0f;      ///< clip / (weight * loss scale)
  float loss_scale = 0.0f;          ///< scale that this step's backward used
  std::int32_t is_overflow = 0;     ///< whether a gradient is infinite or NaN
  std::int32_t gathers_differ = 0;  ///< whether ranks gathered units in different orders
  std::int32_t numbers_differ = 0;  ///< the first rank whose rates or options differ from those of rank 0; 0: none
  SpikeVerdict spike = SpikeVerdict::kNone;  ///< the verdict on the loss
  std::int32_t is_skipped = 0;  ///< whether an overflow, a difference, a spike or a negative loss stops the step
  /// The number, from 1, of the unit whose gradients on this rank are not all finite; 0 if there is none. It is used if
  /// units are updated in backward.
  std::int32_t not_finite_unit = 0;
  StepsSoFar so_far;       ///< counts of steps, this step included
  LossScalerState scaler;  ///< state after this step; its scale is used by the next backward
  SpikeState spikes;       ///< state after this step
  NoiseState noise;        ///< state after this step
};

/// The part of a decision that is known before a step.
struct DecisionRule {
  double microbatches = 1.0;  ///< number of ranks times number of a rank's microbatches in a step
  double max_norm = 0.0;      ///< gradient_clipping; 0: no clipping
  LossScaleRule loss_scale;
  SpikeRule spikes;
  double noise_smoothing = 0.0;  ///< NoiseScaleConfig::smoothing
  double base_lr = 0.0;          ///< the argument of scaled_lr (scaled_lr.h)
  BatchScale batch_scale;
  SampleWarmUp warm_up;       ///< the argument of warm_up_ratio
  std::int64_t replicas = 1;  ///< number of replicas that train separately; each is assumed to have as many samples as
                              ///< this one
};

/// The facts about a step, other than the sums, that are known after ranks have agreed.
struct StepFacts {
  double sum_of_squares = 0.0;  ///< sum of the squares of all summed gradients, with the loss scale
  bool is_finite = true;        ///< false where a gradient is known to be infinite or NaN
  float loss_scale = 1.0f;      ///< scale that this step's backward used
  double lr_ratio = 1.0;        ///< the schedule's ratio for the steps applied so far (lr_ratio_at)
  double median = 0.0;          ///< median of the window of losses; not read while the window is not full
};

/// The outcome of a decision. On a GPU each thread computes it, before one of the threads writes it into the
/// StepDecision.
struct Verdict {
  double norm, lr, loss;
  float gradient_scale;
  SpikeVerdict spike;
  bool is_overflow, is_skipped;
};

/// Returns the rate of a step with `samples` samples of this replica.
TESSERA_ALWAYS_INLINE double rate_at(const DecisionRule& rule, const StepDecision& before, double lr_ratio,
                                     std::int64_t samples) {
  const std::int64_t batch = samples * rule.replicas;
  return scaled_lr(rule.base_lr, rule.batch_scale, batch,
                   lr_ratio * warm_up_ratio(rule.warm_up, before.so_far.samples, batch));
}

/// Returns the verdict on a step. `step` has the step's sums and differences, and the state after the step before.
TESSERA_ALWAYS_INLINE Verdict verdict_on(const DecisionRule& rule, const StepDecision& step, const StepFacts& facts) {
  const double mean = mean_factor(step.weight, facts.loss_scale);
  Verdict v;
  v.norm = sqrt(facts.sum_of_squares) * mean;
  v.is_overflow = !facts.is_finite || !(facts.sum_of_squares - facts.sum_of_squares == 0.0);
  v.loss = mean_loss(step.loss, rule.microbatches, step.weight);
  v.is_skipped = v.is_overflow || step.gathers_differ != 0 || step.numbers_differ != 0;
  v.spike = v.is_skipped ? SpikeVerdict::kNone : spike_verdict(rule.spikes, step.spikes, facts.median, v.loss);
  v.is_skipped = v.is_skipped || v.spike == SpikeVerdict::kSpike || v.spike == SpikeVerdict::kNegative;
  v.gradient_scale = static_cast<float>(mean * clip_factor(v.norm, rule.max_norm));
  v.lr = rate_at(rule, step, facts.lr_ratio, step.samples);
  return v;
}

/// Adds the measurements of a step to the sums of the noise scale. A step that is skipped gives no information.
TESSERA_ALWAYS_INLINE void measure_noise(const DecisionRule& rule, const StepFacts& facts, StepDecision& step) {
  if (!(step.own.weights > 0) || step.is_skipped != 0) return;
  NoiseStep measured;
  measured.own = step.own;
  measured.square = facts.sum_of_squares;
  measured.weight = step.weight;
  measured.batch = step.samples > 0 ? static_cast<double>(step.samples) : step.weight;
  measured.loss_scale = step.loss_scale;
  add_noise(rule.noise_smoothing, measured, step.noise);
}

/// Writes the verdict into `step`, counts the step, and computes the state for the next step. `losses` is the ring of
/// SpikeState. If units are updated in backward, `step` may be skipped already.
TESSERA_ALWAYS_INLINE void take_verdict(const DecisionRule& rule, const StepFacts& facts, const Verdict& v,
                                        bool was_skipped, double* losses, StepDecision& step) {
  const bool is_skipped = v.is_skipped || was_skipped;
  step.loss = v.loss;
  step.spike = v.spike;
  step.grad_norm = v.norm;
  step.lr = v.lr;
  step.gradient_scale = v.gradient_scale;
  step.loss_scale = facts.loss_scale;
  step.is_overflow = v.is_overflow || (was_skipped && step.is_overflow != 0) ? 1 : 0;
  step.is_skipped = is_skipped ? 1 : 0;
  step.so_far.applied += is_skipped ? 0 : 1;
  step.so_far.samples += is_skipped ? 0 : step.samples * rule.replicas;
  step.so_far.skipped += is_skipped ? 1 : 0;
  measure_noise(rule, facts, step);
  if (v.spike != SpikeVerdict::kSpike) next_loss_scale(rule.loss_scale, step.scaler, v.is_overflow);
  if (!v.is_overflow) note_loss(rule.spikes, step.spikes, losses, v.spike, facts.median, v.loss);
}

}  // namespace tessera
