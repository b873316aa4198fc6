#include "optim/noise_scale.h"

#include <cmath>

namespace tessera {
namespace {

/// Where small batches make up less than this of what the whole batch has beside the largest of them, the difference of
/// their norms is lost in rounding.
constexpr double kLeastDifference = 1e-9;

}  // namespace

// The two means over data are
//   own.squares = own.weight_squares |G|^2 + own.weights tr(Sigma)
//   square      = weight^2           |G|^2 + weight      tr(Sigma)
// and this solves them for |G|^2 and tr(Sigma).
bool NoiseScale::add(const Step& step) {
  const OwnGradients& own = step.own;
  const double weight = step.weight;
  const double determinant = own.weights * (weight * weight) - own.weight_squares * weight;
  const double unscaled = 1.0 / (step.loss_scale * step.loss_scale);
  const double small = own.squares * unscaled, big = step.square * unscaled;
  if (!(determinant > kLeastDifference * own.weights * weight * weight) || !(step.batch > 0)) return false;
  if (!std::isfinite(small) || !std::isfinite(big)) return false;
  const double square = (own.weights * big - weight * small) / determinant;
  const double variance = (weight * weight * small - own.weight_squares * big) / determinant;
  const double share = 1.0 - smoothing_;
  state_.square = smoothing_ * state_.square + share * square;
  // That of a thing of weight 1, of which a sample has weight / batch.
  state_.variance = smoothing_ * state_.variance + share * variance * step.batch / weight;
  state_.weight = smoothing_ * state_.weight + share;
  state_.batch = step.batch;
  return true;
}

}  // namespace tessera
