// Tests the estimates of the gradient noise scale against the paper's equations, and against the exact values of a
// model with known noise.

#include "optim/noise_scale.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace tessera {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// The estimates after the steps that were added.
struct Estimates {
  explicit Estimates(double smoothing) : smoothing(smoothing) {}

  bool add(const NoiseStep& step) { return add_noise(smoothing, step, state); }
  double square() const { return NoiseScale(state).square(); }
  double variance() const { return NoiseScale(state).variance(); }
  double scale() const { return NoiseScale(state).scale(); }
  double batch() const { return NoiseScale(state).batch(); }

  double smoothing;
  NoiseState state;
};

/// Returns a step whose sums have these weights. The squared norms of the sums are exactly what the formulas expect on
/// average over data.
NoiseStep mean_step(double square, double variance, const std::vector<double>& weights, double batch) {
  NoiseStep step;
  for (const double weight : weights) {
    step.own.add(weight * weight * square + weight * variance, weight);
    step.weight += weight;
  }
  step.square = step.weight * step.weight * square + step.weight * variance;
  step.batch = batch;
  return step;
}

TEST(NoiseScale, EqualBatchesGiveThePapersEstimates) {
  const double small_batch = 4, big_batch = 12;  // three ranks have four samples each
  const double squares[] = {5.0, 7.0, 6.5};      // |G_small|^2 of each rank's mean
  const double big = 3.25;                       // |G_big|^2 of the mean over ranks
  const double small = (squares[0] + squares[1] + squares[2]) / 3;
  NoiseStep step;
  for (const double each : squares) step.own.add(each, 1.0);
  step.weight = 3;
  step.square = 9 * big;
  step.batch = big_batch;
  Estimates noise(0);
  ASSERT_TRUE(noise.add(step));
  const double square = (big_batch * big - small_batch * small) / (big_batch - small_batch);
  const double variance = (small - big) / (1 / small_batch - 1 / big_batch);
  EXPECT_NEAR(noise.square(), square, 1e-12);
  EXPECT_NEAR(noise.variance(), variance, 1e-12);
  EXPECT_NEAR(noise.scale(), variance / square, 1e-12);
  EXPECT_EQ(noise.batch(), big_batch);
}

TEST(NoiseScale, MeansOverDataGiveTheTruthWhateverTheWeights) {
  for (const std::vector<double>& weights :
       {std::vector<double>{1, 1}, {3, 1, 0, 7.5}, {1e-3, 4}, {2, 2, 2, 2, 2, 2, 2, 2}}) {
    Estimates noise(0);
    double all = 0;
    for (const double weight : weights) all += weight;
    ASSERT_TRUE(noise.add(mean_step(0.75, 40, weights, 2 * all)));
    EXPECT_NEAR(noise.square(), 0.75, 1e-6);
    EXPECT_NEAR(noise.variance(), 80, 1e-4) << "a sample is half a thing of weight 1";
  }
}

TEST(NoiseScale, SumsOfTheFirstMicrobatchesGiveTheTruthToo) {
  NoiseStep step = mean_step(0.75, 40, {1, 3, 4, 6}, 6);
  step.weight = 6;  // the last sum is that of the whole batch
  step.square = 6 * 6 * 0.75 + 6 * 40;
  Estimates noise(0);
  ASSERT_TRUE(noise.add(step));
  EXPECT_NEAR(noise.square(), 0.75, 1e-12);
  EXPECT_NEAR(noise.variance(), 40, 1e-12);
}

TEST(NoiseScale, LossScaleMakesNoDifference) {
  NoiseStep step = mean_step(0.75, 40, {1, 1}, 2);
  step.loss_scale = 1024;
  step.square *= 1024.0 * 1024;
  step.own.squares *= 1024.0 * 1024;
  Estimates noise(0);
  ASSERT_TRUE(noise.add(step));
  EXPECT_NEAR(noise.square(), 0.75, 1e-12);
  EXPECT_NEAR(noise.variance(), 40, 1e-12);
}

TEST(NoiseScale, SmoothingHasNoBiasFromItsBeginning) {
  Estimates noise(0.75);
  EXPECT_EQ(noise.scale(), 0) << "nothing is known";
  noise.add(mean_step(1, 8, {1, 1}, 2));
  EXPECT_NEAR(noise.square(), 1, 1e-12);
  EXPECT_NEAR(noise.variance(), 8, 1e-12);
  noise.add(mean_step(2, 1, {1, 1}, 4));
  EXPECT_NEAR(noise.square(), (0.75 * 1 + 2) / 1.75, 1e-12);
  EXPECT_NEAR(noise.variance(), (0.75 * 8 + 2) / 1.75, 1e-12);
  EXPECT_EQ(noise.batch(), 4);
  Estimates other = noise;
  noise.add(mean_step(5, 3, {1, 2}, 3));
  other.add(mean_step(5, 3, {1, 2}, 3));
  EXPECT_EQ(other.scale(), noise.scale());
  EXPECT_EQ(other.state.weight, noise.state.weight);
}

TEST(NoiseScale, StepThatTellsNothingChangesNothing) {
  Estimates noise(0.5);
  ASSERT_TRUE(noise.add(mean_step(1, 8, {1, 1}, 2)));
  NoiseStep unknown = mean_step(3, 3, {1, 1}, 2), infinite = unknown, none = unknown;
  unknown.own.squares = kNaN;
  infinite.square = std::numeric_limits<double>::infinity();
  none.batch = 0;
  for (const NoiseStep& step :
       {unknown, infinite, none, mean_step(3, 3, {2}, 2), mean_step(3, 3, {0, 2, 0}, 2), mean_step(3, 3, {}, 2)}) {
    EXPECT_FALSE(noise.add(step));
    EXPECT_EQ(noise.scale(), 8);
    EXPECT_EQ(noise.batch(), 2);
  }
}

TEST(NoiseScale, EstimateBelowZeroIsNoScale) {
  NoiseStep step = mean_step(1, 8, {1, 1}, 2);
  step.square = 0;  // the ranks' gradients cancel each other
  Estimates noise(0);
  ASSERT_TRUE(noise.add(step));
  EXPECT_LT(noise.square(), 0);
  EXPECT_EQ(noise.scale(), 0);
}

}  // namespace
}  // namespace tessera
