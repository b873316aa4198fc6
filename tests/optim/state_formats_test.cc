// Tests properties of an optimizer's results with narrow states. step_loops_test.cc compares bits.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "runtime/config/strategy_names.h"
#include "tests/optim/step_problem.h"

namespace tessera {
namespace {

/// Parameters with states that begin at zero, and the steps on them.
struct Trainee {
  std::unique_ptr<Optimizer> optimizer;
  std::vector<float> parameters;
  StateDType dtype;
  std::array<std::vector<std::byte>, 2> data;
  std::array<std::vector<float>, 2> scales;
  std::int64_t steps = 0;
  std::uint64_t stream = 1;

  Trainee(const OptimizerConfig& config, std::vector<float> values)
      : optimizer(make_optimizer(config)), parameters(std::move(values)), dtype(config.state_dtype) {
    const StateBytes bytes = state_bytes(dtype, static_cast<std::int64_t>(parameters.size()));
    for (auto& state : data) state.resize(static_cast<std::size_t>(bytes.data));
    for (auto& scale : scales) scale.resize(static_cast<std::size_t>(bytes.scales) / sizeof(float));
  }

  void step(std::span<const float> gradient, float lr) {
    OptimizerSlice slice{.gradient = gradient, .master = parameters, .stream = stream};
    for (std::size_t i = 0; i < optimizer->states().size(); ++i) slice.states[i] = {data[i], scales[i]};
    optimizer->step({.lr = lr, .step = ++steps}, slice);
  }
};

constexpr StateDType kNarrow[] = {StateDType::kBF16, StateDType::k8Bit};

OptimizerConfig adamw(StateDType dtype) {
  return {.type = OptimizerType::kAdamW, .beta1 = 0.9, .beta2 = 0.999, .weight_decay = 0.0, .state_dtype = dtype};
}

/// Logistic regression on points from two clouds that overlap. Columns differ in scale by up to 2^10, as a model's
/// gradients differ within a block.
class LogisticProblem {
 public:
  static constexpr std::size_t kFeatures = 600, kPoints = 256;  // two blocks, and a part of one more

  LogisticProblem() : points_(kPoints * kFeatures) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < kPoints; ++i) {
      for (std::size_t j = 0; j < kFeatures; ++j) {
        const float centre = (i % 2 == 0 ? 0.03f : -0.03f) * static_cast<float>(j % 3);
        points_[i * kFeatures + j] = std::ldexp(normal(random) + centre, -static_cast<int>(j % 11));
      }
    }
  }

  /// Returns the mean loss over the `count` points that begin with point `first`, and writes its gradient.
  double loss(std::span<const float> weights, std::size_t first, std::size_t count, std::span<float> gradient) const {
    std::fill(gradient.begin(), gradient.end(), 0.0f);
    double total = 0.0;
    for (std::size_t k = 0; k < count; ++k) {
      const std::size_t i = (first + k) % kPoints;
      const float* x = &points_[i * kFeatures];
      const double label = i % 2 == 0 ? 1.0 : -1.0;
      const double margin = label * std::inner_product(weights.begin(), weights.end(), x, 0.0);
      total += std::log1p(std::exp(-margin));
      const double slope = -label / (1.0 + std::exp(margin)) / static_cast<double>(count);
      for (std::size_t j = 0; j < kFeatures; ++j) gradient[j] += static_cast<float>(slope * x[j]);
    }
    return total / static_cast<double>(count);
  }

  double train(const OptimizerConfig& config, float lr, int steps) const {
    Trainee run(config, std::vector<float>(kFeatures));
    std::vector<float> gradient(kFeatures);
    for (int t = 0; t < steps; ++t) {
      loss(run.parameters, static_cast<std::size_t>(t) * 37, 32, gradient);
      run.step(gradient, lr);
    }
    return loss(run.parameters, 0, kPoints, gradient);
  }

 private:
  std::vector<float> points_;
};

TEST(StateFormats, NarrowStatesReachTheLossOfFp32) {
  const LogisticProblem problem;
  const double untrained = std::log(2.0);
  const double wanted = problem.train(adamw(StateDType::kF32), 3e-3f, 300);
  ASSERT_LT(wanted, 0.5 * untrained);  // training with fp32 states learns
  for (StateDType dtype : kNarrow) {
    EXPECT_NEAR(problem.train(adamw(dtype), 3e-3f, 300) / wanted, 1.0, 0.03) << name_of(dtype);
  }
}

TEST(StateFormats, EveryRuleReachesItsFp32LossWithNarrowStates) {
  using enum OptimizerType;
  const LogisticProblem problem;
  const std::pair<OptimizerConfig, float> cases[] = {
      {{.type = kSgd, .weight_decay = 0.0, .momentum = 0.9}, 0.05f},
      {{.type = kLion, .beta2 = 0.99, .weight_decay = 0.0}, 1e-3f},
      {{.type = kAdagrad, .weight_decay = 0.0}, 3e-2f},
      {{.type = kRmsprop, .weight_decay = 0.0, .momentum = 0.9}, 3e-4f},
  };
  for (auto [config, lr] : cases) {
    const double wanted = problem.train(config, lr, 300);
    ASSERT_LT(wanted, 0.5 * std::log(2.0)) << name_of(config.type);
    for (StateDType dtype : kNarrow) {
      config.state_dtype = dtype;
      EXPECT_NEAR(problem.train(config, lr, 300) / wanted, 1.0, 0.03) << name_of(config.type) << " " << name_of(dtype);
    }
  }
}

// A second moment without gradients shrinks by a thousandth per step at beta2 0.999, which is less than either format
// resolves. It would never shrink if it were rounded to nearest. A step with a new gradient shows which share of the
// old second moment is left.
TEST(StateFormats, SecondMomentDecaysBelowItsPrecision) {
  constexpr std::size_t kNumel = 256 * 64;
  constexpr int kSteps = 1000;
  const auto mean_move = [&](StateDType dtype) {
    OptimizerConfig config = adamw(dtype);
    config.beta1 = 0.0;  // the step then depends on the new gradient alone
    Trainee run(config, std::vector<float>(kNumel));
    std::vector<float> gradient(kNumel);
    std::mt19937 random(2);
    std::uniform_real_distribution<float> between(0.2f, 1.0f);
    for (float& g : gradient) g = between(random);
    run.step(gradient, 0.0f);
    for (std::size_t i = 0; i < kNumel; ++i) gradient[i] = i % 256 == 0 ? 0.03f : 0.0f;  // this keeps the scale large
    for (int t = 0; t < kSteps; ++t) run.step(gradient, 0.0f);
    std::fill(gradient.begin(), gradient.end(), 1e-6f);
    run.step(gradient, 1.0f);
    double sum = 0.0;
    for (std::size_t i = 0; i < kNumel; ++i) sum += i % 256 == 0 ? 0.0 : run.parameters[i];
    return sum;
  };
  const double wanted = mean_move(StateDType::kF32);
  for (StateDType dtype : kNarrow) EXPECT_NEAR(mean_move(dtype) / wanted, 1.0, 0.03) << name_of(dtype);
}

// The gradient of one element is a million times that of the other elements, so their moments are far below the block's
// precision.
TEST(StateFormats, SmallElementBesideALargeOneTakesNoGiantStep) {
  for (StateDType dtype : {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit}) {
    Trainee run(adamw(dtype), std::vector<float>(256));
    std::vector<float> gradient(256, 1e-6f);
    gradient[100] = 1.0f;
    float largest = 0.0f;
    for (int t = 0; t < 200; ++t) {
      const std::vector<float> before = run.parameters;
      run.step(gradient, 1e-3f);
      for (std::size_t i = 0; i < 256; ++i) {
        largest = std::max(largest, std::fabs(run.parameters[i] - before[i]));
      }
    }
    EXPECT_LT(largest, 5e-3f) << name_of(dtype);  // a step is about lr, but about 1e2 without a second moment
  }
}

TEST(StateFormats, BlockWithoutGradientsStaysAtRest) {
  for (StateDType dtype : kNarrow) {
    Trainee run(adamw(dtype), std::vector<float>(300, 1.5f));
    const std::vector<float> gradient(300, 0.0f);
    for (int t = 0; t < 10; ++t) run.step(gradient, 1e-2f);
    EXPECT_EQ(run.parameters, std::vector<float>(300, 1.5f)) << name_of(dtype);
  }
}

TEST(StateFormats, InfiniteGradientStaysNonFinite) {
  Trainee run(adamw(StateDType::k8Bit), std::vector<float>(256, 1.0f));
  std::vector<float> gradient(256, 0.1f);
  gradient[7] = HUGE_VALF;
  run.step(gradient, 1e-2f);
  gradient[7] = 0.1f;
  run.step(gradient, 1e-2f);
  EXPECT_FALSE(std::isfinite(run.parameters[7]));
}

TEST(StateFormats, NoiseDependsOnTheGroupAndTheStep) {
  for (StateDType dtype : kNarrow) {
    const auto states_after = [&](std::uint64_t stream, std::int64_t steps_before) {
      Trainee run(adamw(dtype), std::vector<float>(256));
      run.stream = stream;
      run.steps = steps_before;
      std::vector<float> gradient(256);
      for (std::size_t i = 0; i < 256; ++i) gradient[i] = std::sin(static_cast<float>(i));
      run.step(gradient, 1e-3f);
      return run.data;
    };
    EXPECT_EQ(states_after(1, 0), states_after(1, 0)) << name_of(dtype);
    EXPECT_NE(states_after(1, 0), states_after(2, 0)) << name_of(dtype);
    EXPECT_NE(states_after(1, 0), states_after(1, 1)) << name_of(dtype);
  }
}

}  // namespace
}  // namespace tessera
