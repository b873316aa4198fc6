#pragma once

#include "optim/arithmetic/noise_rule.h"

namespace tessera {

/// The gradient noise scale (McCandlish et al. 2018, arXiv 1812.06162, appendix A), as add_noise has measured it. It is
/// computed from the norms of small batches' gradients (OwnGradients, of all ranks) and the norm of the whole batch's
/// gradient. The estimates of |G|^2 and tr(Sigma) have no bias. Each estimate is smoothed, and the noise scale is their
/// quotient. If each of N ranks has a batch of n items, this gives the paper's equations with B_small = n and B_big = N
/// n. All ranks get the same values.
class NoiseScale {
 public:
  explicit NoiseScale(const NoiseState& state) : state_(state) {}

  /// `square` returns the estimate of |G|^2, and `variance` that of tr(Sigma) for one sample; 0 before the first step.
  /// Both estimates may be below 0.
  double square() const { return mean(state_.square); }
  double variance() const { return mean(state_.variance); }
  /// Returns tr(Sigma) / |G|^2 in samples; 0 if it is not known, because one of the two estimates is not above 0.
  double scale() const { return square() > 0 && variance() > 0 ? variance() / square() : 0.0; }
  double batch() const { return state_.batch; }

 private:
  double mean(double sum) const { return state_.weight > 0 ? sum / state_.weight : 0.0; }

  const NoiseState state_;
};

}  // namespace tessera
