#pragma once

#include "optim/arithmetic/noise_rule.h"

namespace tessera {

/// The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A). It is computed from the norms of
/// small batches' gradients (OwnGradients, of all ranks) and the norm of the whole batch's gradient. NoiseScale
/// estimates |G|^2 and tr(Sigma) without a bias, smooths each of them, and divides them. If each of N ranks has a batch
/// of n items, this gives the paper's equations with B_small = n and B_big = N n. CpuStep has a NoiseScale, and a GPU
/// computes the same bits (add_noise); all ranks get the same values.
class NoiseScale {
 public:
  using Step = NoiseStep;
  using State = NoiseState;

  /// `smoothing`: from 0 (only the latest step counts) to below 1.
  explicit NoiseScale(double smoothing) : smoothing_(smoothing) {}

  /// Adds a step. Returns false, and changes nothing, if the step gives no information: if no batch is smaller than the
  /// whole batch, or if a number is not finite.
  bool add(const Step& step);

  /// `square` returns the estimate of |G|^2, and `variance` that of tr(Sigma) for one sample; 0 before the first step.
  /// Both estimates may be below 0.
  double square() const { return mean(state_.square); }
  double variance() const { return mean(state_.variance); }
  /// Returns tr(Sigma) / |G|^2 in samples; 0 if it is not known, because one of the two estimates is not above 0.
  double scale() const { return square() > 0 && variance() > 0 ? variance() / square() : 0.0; }
  double batch() const { return state_.batch; }

  const State& state() const { return state_; }
  void restore(const State& state) { state_ = state; }

 private:
  double mean(double sum) const { return state_.weight > 0 ? sum / state_.weight : 0.0; }

  double smoothing_;
  State state_;
};

}  // namespace tessera
