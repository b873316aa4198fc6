#pragma once

// See docs/glossary.md: unit.

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// Sums from which the noise of gradients is estimated. A sum of gradients with weight w (MicrobatchInfo::weight of one
/// microbatch or several) has the squared norm w^2 |G|^2 + w tr(Sigma) on average over the data. G is the gradient
/// without noise, and Sigma the covariance of the gradient of one item of weight 1. So three sums are enough.
struct OwnGradients {
  double squares = 0.0;         ///< sum of the squared norms; NaN: not known
  double weights = 0.0;         ///< sum of the weights
  double weight_squares = 0.0;  ///< sum of the weights' squares

  void add(double square, double weight) { add({square, weight, weight * weight}); }
  void add(const OwnGradients& other) {
    squares += other.squares;
    weights += other.weights;
    weight_squares += other.weight_squares;
  }
};

/// The state of NoiseScale (optim/noise_scale.h) after the steps so far, as plain data; a checkpoint keeps it. The
/// smoothed sums begin at 0, and so does their total weight, which approaches 1.
struct NoiseState {
  double square = 0.0, variance = 0.0;
  double weight = 0.0;
  double batch = 0.0;  ///< the batch of the latest step that was measured
};

/// The numbers of one step.
struct NoiseStep {
  OwnGradients own;         ///< the sums of all ranks
  double square = 0.0;      ///< squared norm of the sum of all gradients
  double weight = 0.0;      ///< weight of the sum of all gradients
  double batch = 0.0;       ///< number of the step's samples, or else the step's weight; results are in this unit
  double loss_scale = 1.0;  ///< factor by which all gradients were multiplied
};

/// The least difference between the whole batch's weight and the weighted mean of the small batches' weights, as a
/// fraction of the whole batch's weight. A step with a smaller difference is not used, since rounding errors would be
/// larger than the difference.
constexpr double kLeastNoiseDifference = 1e-9;

/// Adds a step. Returns false, and changes nothing, if the step gives no information: if no batch is smaller than the
/// whole batch, or if a number is not finite. If a GPU trains, the device calls this function, with the same bits.
///
/// The two sums of squares are, on average over the data,
///   own.squares = own.weight_squares |G|^2 + own.weights tr(Sigma)
///   square      = weight^2           |G|^2 + weight      tr(Sigma)
/// and this function solves the two equations for |G|^2 and tr(Sigma).
TESSERA_ALWAYS_INLINE bool add_noise(double smoothing, const NoiseStep& step, NoiseState& state) {
  const double weight = step.weight;
  const double determinant = step.own.weights * (weight * weight) - step.own.weight_squares * weight;
  const double unscaled = 1.0 / (step.loss_scale * step.loss_scale);
  const double small = step.own.squares * unscaled, big = step.square * unscaled;
  if (!(determinant > kLeastNoiseDifference * step.own.weights * weight * weight) || !(step.batch > 0)) return false;
  if (small - small != 0.0 || big - big != 0.0) return false;  // one of the two numbers is not finite
  const double square = (step.own.weights * big - weight * small) / determinant;
  const double variance = (weight * weight * small - step.own.weight_squares * big) / determinant;
  const double share = 1.0 - smoothing;
  state.square = smoothing * state.square + share * square;
  // `variance` belongs to an item of weight 1; a sample has the weight `weight / batch`.
  state.variance = smoothing * state.variance + share * variance * step.batch / weight;
  state.weight = smoothing * state.weight + share;
  state.batch = step.batch;
  return true;
}

}  // namespace tessera
