#include "optim/adamw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/optimizer_checks.h"
#include "tests/optim/step_problem.h"

namespace tessera {
namespace {

using ::testing::FloatNear;
using ::testing::Pointwise;

OptimizerConfig config(OptimizerType type) {
  return {.type = type, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
}

// torch.optim.AdamW / Adam(lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False), PyTorch 2.11.
const std::vector<float> kTorchAdamW = {0.44975197315216064f, -1.1997570991516113f, 2.9403815269470215f,
                                        -0.046755377203226089f, -0.02121691033244133f};
const std::vector<float> kTorchAdam = {0.45137006044387817f, -1.2015748023986816f, 2.9509820938110352f,
                                       -0.0021433490328490734f, -0.021382495760917664f};

TEST(AdamW, FollowsPyTorchAdamW) {
  EXPECT_THAT(five_steps(*make_optimizer(config(OptimizerType::kAdamW)), 0.01f),
              Pointwise(FloatNear(1e-6f), kTorchAdamW));
}

TEST(AdamW, FollowsPyTorchAdam) {
  EXPECT_THAT(five_steps(*make_optimizer(config(OptimizerType::kAdam)), 0.01f),
              Pointwise(FloatNear(1e-6f), kTorchAdam));
}

TEST(AdamW, ScalesGradientsFirst) {
  const auto optimizer = make_optimizer(config(OptimizerType::kAdamW));
  // A power of two only moves exponents: not one bit may differ.
  EXPECT_EQ(five_steps(*optimizer, 0.01f), five_steps(*optimizer, 0.01f, 0.125f));
}

// The folded constants against the textbook form in fp64, over a long run: a folding mistake grows with t.
TEST(AdamW, AgreesWithTheTextbookFormInFp64) {
  for (OptimizerType type : {OptimizerType::kAdamW, OptimizerType::kAdam}) {
    const OptimizerConfig c = config(type);
    const auto optimizer = make_optimizer(c);
    std::vector<float> p = {0.7f}, m = {0.0f}, v = {0.0f};
    double wanted = p[0], first = 0.0, second = 0.0;
    const double lr = static_cast<double>(0.003f);
    for (int t = 1; t <= 500; ++t) {
      std::vector<float> gradient = {std::sin(0.1f * static_cast<float>(t)) + 0.2f};
      double g = gradient[0];
      if (type == OptimizerType::kAdam) g += c.weight_decay * wanted;
      if (type == OptimizerType::kAdamW) wanted *= 1.0 - lr * c.weight_decay;
      first = c.beta1 * first + (1.0 - c.beta1) * g;
      second = c.beta2 * second + (1.0 - c.beta2) * g * g;
      const double mean = first / (1.0 - std::pow(c.beta1, t)), square = second / (1.0 - std::pow(c.beta2, t));
      wanted -= lr * mean / (std::sqrt(square) + c.eps);
      optimizer->step({.lr = 0.003f, .step = t},
                      {.gradient = gradient, .master = p, .state0 = f32_state(m), .state1 = f32_state(v)});
      ASSERT_NEAR(p[0], wanted, 1e-5) << "step " << t;
    }
  }
}

TEST(AdamW, EpsilonIsFoldedWithTheBiasCorrection) {
  // With |g| near eps, a wrongly scaled eps' moves the first step a lot: wanted is lr * g / (|g| + eps).
  OptimizerConfig c = config(OptimizerType::kAdamW);
  c.weight_decay = 0.0;
  c.eps = 1e-3;
  std::vector<float> p = {0.0f}, g = {1e-3f}, m = {0.0f}, v = {0.0f};
  make_optimizer(c)->step({.lr = 1.0f, .step = 1},
                          {.gradient = g, .master = p, .state0 = f32_state(m), .state1 = f32_state(v)});
  EXPECT_NEAR(p[0], -0.5f, 1e-6f);
}

TEST(AdamW, NamesItsStates) {
  const AdamW optimizer({});
  EXPECT_EQ(optimizer.num_states(), 2);
  EXPECT_EQ(optimizer.state_name(0), "exp_avg");
  EXPECT_EQ(optimizer.state_name(1), "exp_avg_sq");
}

TEST(Power, IsExactWhereItCanBe) {
  EXPECT_EQ(power(0.5, 10), std::ldexp(1.0, -10));
  EXPECT_EQ(power(0.9, 0), 1.0);
  EXPECT_NEAR(power(0.999, 100000), std::pow(0.999, 100000), 1e-55);
}

}  // namespace
}  // namespace tessera
