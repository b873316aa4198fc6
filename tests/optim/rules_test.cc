// Compares each rule with PyTorch's, or with its paper's formula in fp64.

#include "optim/rules/rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "optim/rule_optimizer.h"
#include "tests/optim/step_problem.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;

std::vector<std::string> names_of_states(const OptimizerConfig& config, const EmaConfig& ema = {}) {
  const auto optimizer = make_optimizer(config, ema);
  std::vector<std::string> names;
  for (const StateInfo& state : optimizer->states()) names.push_back(state.name);
  return names;
}

// The expected values are those of torch.optim in PyTorch 2.11 on the problem of five_steps, with foreach=False.
void expect_torch(const OptimizerConfig& config, float lr, const std::vector<float>& torch) {
  EXPECT_THAT(five_steps(*make_optimizer(config), {.lr = lr}), Pointwise(FloatNear(1e-6f), torch));
}

OptimizerConfig adam(OptimizerType type) {
  return {.type = type, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
}

TEST(StepRules, EachRuleBelongsToTheTypeOfItsName) {
#define TESSERA_EXPECT(enumerator, Rule) EXPECT_EQ(rule_of(OptimizerType::enumerator), StepRule::enumerator);
  TESSERA_STEP_RULES(TESSERA_EXPECT)
#undef TESSERA_EXPECT
  for (const OptimizerType type : {OptimizerType::kAdamW, OptimizerType::kMuon, OptimizerType::kOwnMatrix})
    EXPECT_EQ(rule_of(type), StepRule::kAdam) << name_of(type);
  for (const OptimizerType type : {OptimizerType::kAdafactor, OptimizerType::kOwn})
    EXPECT_THROW(rule_of(type), std::invalid_argument) << name_of(type);
}

TEST(AdamRule, FollowsPyTorch) {
  expect_torch(
      adam(OptimizerType::kAdamW), 0.01f,
      {0.44975197315216064f, -1.1997570991516113f, 2.9403815269470215f, -0.046755377203226089f, -0.02121691033244133f});
  expect_torch(adam(OptimizerType::kAdam), 0.01f,
               {0.45137006044387817f, -1.2015748023986816f, 2.9509820938110352f, -0.0021433490328490734f,
                -0.021382495760917664f});
}

// The second element has a gradient only after the freeze. The gradient of the third element is 1000 times larger in a
// few steps.
TEST(AdamRule, FrozenSecondMomentsOnlyGrow) {
  OptimizerConfig c = adam(OptimizerType::kAdamW);
  c.freeze_step = 10;
  const auto optimizer = make_optimizer(c);
  Trained run{*optimizer, {0.7f, 0.7f, 0.7f}};
  std::vector<double> wanted(3, run.weights[0]), first(3), second(3);
  const double lr = static_cast<double>(0.003f);
  for (int t = 1; t <= 100; ++t) {
    const float wave = std::sin(0.1f * static_cast<float>(t)) + 0.2f;
    const std::vector<float> gradient = {wave, t <= 10 ? 0.0f : wave, t % 25 == 0 ? 1000 * wave : wave};
    const double root = std::sqrt(1.0 - std::pow(c.beta2, std::min(t, 10)));
    for (std::size_t i = 0; i < 3; ++i) {
      const double g = gradient[i], added = (1.0 - c.beta2) * g * g;
      wanted[i] *= 1.0 - lr * c.weight_decay;
      first[i] = c.beta1 * first[i] + (1.0 - c.beta1) * g;
      second[i] = t <= 10 ? c.beta2 * second[i] + added : std::max(second[i], added);
      wanted[i] -= lr * first[i] / (1.0 - std::pow(c.beta1, t)) / (std::sqrt(second[i]) / root + c.eps);
    }
    const float before = run.states[1].empty() ? 0 : run.states[1][0];
    run.step(gradient, {.lr = 0.003f});
    if (t > 10) {
      EXPECT_EQ(run.states[1][0], before) << "step " << t;
    }
    for (std::size_t i = 0; i < 3; ++i) ASSERT_NEAR(run.weights[i], wanted[i], 1e-7 * t) << "step " << t << ", " << i;
  }
  EXPECT_GT(run.weights[1], -1.0f);
}

// The folded constants are compared with the textbook form in fp64, over a long run, since a mistake in folding grows
// with t.
TEST(AdamRule, AgreesWithTheTextbookFormInFp64) {
  for (OptimizerType type : {OptimizerType::kAdamW, OptimizerType::kAdam}) {
    const OptimizerConfig c = adam(type);
    const auto optimizer = make_optimizer(c);
    Trained run{*optimizer, {0.7f}};
    double wanted = run.weights[0], first = 0.0, second = 0.0;
    const double lr = static_cast<double>(0.003f);
    for (int t = 1; t <= 500; ++t) {
      const float gradient = std::sin(0.1f * static_cast<float>(t)) + 0.2f;
      double g = gradient;
      if (type == OptimizerType::kAdam) g += c.weight_decay * wanted;
      if (type == OptimizerType::kAdamW) wanted *= 1.0 - lr * c.weight_decay;
      first = c.beta1 * first + (1.0 - c.beta1) * g;
      second = c.beta2 * second + (1.0 - c.beta2) * g * g;
      const double mean = first / (1.0 - std::pow(c.beta1, t)), square = second / (1.0 - std::pow(c.beta2, t));
      wanted -= lr * mean / (std::sqrt(square) + c.eps);
      run.step({gradient}, {.lr = 0.003f});
      ASSERT_NEAR(run.weights[0], wanted, 1e-5) << "step " << t;
    }
  }
}

TEST(AdamRule, EpsilonIsFoldedWithTheBiasCorrection) {
  // If |g| is near eps, a wrongly scaled eps changes the first step by a large factor. The correct step is lr * g /
  // (|g| + eps).
  OptimizerConfig c = adam(OptimizerType::kAdamW);
  c.weight_decay = 0.0;
  c.eps = 1e-3;
  const auto optimizer = make_optimizer(c);
  Trained run{*optimizer, {0.0f}};
  run.step({1e-3f}, {.lr = 1.0f});
  EXPECT_NEAR(run.weights[0], -0.5f, 1e-6f);
}

TEST(SgdRule, FollowsPyTorch) {
  using enum OptimizerType;
  expect_torch(
      {.type = kSgd, .weight_decay = 0.1}, 0.1f,
      {0.32748004794120789f, -1.0797321796417236f, 2.7863719463348389f, 0.00080297508975490928f, 0.18068742752075195f});
  expect_torch(
      {.type = kSgd, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.5}, 0.1f,
      {0.28019925951957703f, -1.0426191091537476f, 2.5757019519805908f, 0.00073770078597590327f, 0.75624150037765503f});
  expect_torch({.type = kSgd, .weight_decay = 0.0, .momentum = 0.9, .nesterov = true}, 0.1f,
               {0.064672127366065979f, -0.96424609422683716f, 2.7318909168243408f, 0.00056467211106792092f,
                1.1267983913421631f});
}

TEST(SgdRule, FirstStepCopiesTheGradientIntoTheBuffer) {
  const auto optimizer =
      make_optimizer({.type = OptimizerType::kSgd, .weight_decay = 0.0, .momentum = 0.9, .dampening = 0.5});
  Trained run{*optimizer, {1.0f}};
  run.states[0] = {77.0f};  // old values in the state must have no effect
  run.step({2.0f}, {.lr = 0.5f});
  EXPECT_EQ(run.states[0][0], 2.0f);
  EXPECT_EQ(run.weights[0], 0.0f);
  run.step({2.0f}, {.lr = 0.5f});
  EXPECT_FLOAT_EQ(run.states[0][0], 2.0f * 0.9f + 0.5f * 2.0f);
}

// The formula is Algorithm 2 of arXiv 2302.06675 in fp64, since PyTorch has no Lion.
TEST(LionRule, FollowsThePaper) {
  const OptimizerConfig c{.type = OptimizerType::kLion, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.5};
  const auto optimizer = make_optimizer(c);
  Trained run{*optimizer, {0.7f, -0.3f, 0.1f}};
  std::vector<double> wanted = {0.7f, -0.3f, 0.1f}, momentum(3);
  const double lr = static_cast<double>(0.003f);
  for (int t = 1; t <= 200; ++t) {
    const auto x = static_cast<float>(t);
    const std::vector<float> gradient = {std::sin(0.1f * x) + 0.2f, 1e-6f * std::cos(0.3f * x), 0.0f};
    for (std::size_t i = 0; i < 3; ++i) {
      const double direction = c.beta1 * momentum[i] + (1.0 - c.beta1) * gradient[i];
      const double sign = direction > 0 ? 1.0 : direction < 0 ? -1.0 : 0.0;
      wanted[i] = wanted[i] * (1.0 - lr * c.weight_decay) - lr * sign;
      momentum[i] = c.beta2 * momentum[i] + (1.0 - c.beta2) * gradient[i];
    }
    run.step(gradient, {.lr = 0.003f});
    for (std::size_t i = 0; i < 3; ++i) ASSERT_NEAR(run.weights[i], wanted[i], 5e-8 * t) << "step " << t << ", " << i;
  }
}

TEST(AdagradRule, FollowsPyTorch) {
  expect_torch(
      {.type = OptimizerType::kAdagrad, .eps = 1e-8, .weight_decay = 0.1, .lr_decay = 0.1}, 0.1f,
      {0.15937064588069916f, -0.904215931892395f, 2.753040313720703f, -0.004720091354101896f, 0.09026345610618591f});
}

TEST(RmspropRule, FollowsPyTorch) {
  OptimizerConfig config{.type = OptimizerType::kRmsprop, .eps = 1e-8, .weight_decay = 0.1, .alpha = 0.9};
  expect_torch(config, 0.01f,
               {0.37143823504447937f, -1.1189959049224854f, 2.9063479900360107f, -0.005252980627119541f,
                -0.013201520778238773f});
  config.momentum = 0.9;
  expect_torch(
      config, 0.01f,
      {0.14414097368717194f, -0.8932267427444458f, 2.7222962379455566f, 0.018768146634101868f, 0.14406366646289825f});
  config.eps = 1e-4;
  config.centered = true;
  expect_torch(
      config, 0.01f,
      {0.10356416553258896f, -0.852371096611023f, 2.6920812129974365f, -0.011018414981663227f, 0.16044852137565613f});
  config.momentum = 0.0;
  expect_torch(
      config, 0.01f,
      {0.3532730042934418f, -1.1007049083709717f, 2.893306016921997f, -0.007116451393812895f, -0.008841680362820625f});
}

TEST(RmspropRule, CenteredSpreadNeverFallsBelowZero) {
  // A constant gradient has no variance, so the formula subtracts two numbers that differ only by rounding.
  const auto optimizer =
      make_optimizer({.type = OptimizerType::kRmsprop, .eps = 1e-3, .weight_decay = 0.0, .centered = true});
  Trained run{*optimizer, {0.0f}};
  for (int t = 0; t < 5000; ++t) run.step({0.1234567f}, {.lr = 1e-6f});
  EXPECT_TRUE(std::isfinite(run.weights[0]));
}

TEST(RmspropRule, CenteredNarrowStatesAreRefused) {
  EXPECT_THROW(make_optimizer({.type = OptimizerType::kRmsprop, .centered = true, .state_dtype = StateDType::kBF16}),
               std::invalid_argument);
}

TEST(RuleOptimizer, NamesItsStatesAsPyTorchDoes) {
  using enum OptimizerType;
  EXPECT_THAT(names_of_states({.type = kAdamW}), ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(names_of_states({.type = kSgd}), ElementsAre());
  EXPECT_THAT(names_of_states({.type = kSgd, .momentum = 0.9}), ElementsAre("momentum_buffer"));
  EXPECT_THAT(names_of_states({.type = kLion}), ElementsAre("exp_avg"));
  EXPECT_THAT(names_of_states({.type = kAdagrad}), ElementsAre("sum"));
  EXPECT_THAT(names_of_states({.type = kRmsprop}), ElementsAre("square_avg"));
  EXPECT_THAT(names_of_states({.type = kRmsprop, .centered = true}), ElementsAre("square_avg", "grad_avg"));
  EXPECT_THAT(names_of_states({.type = kRmsprop, .momentum = 0.9, .centered = true}, {.decay = 0.9}),
              ElementsAre("square_avg", "momentum_buffer", "grad_avg", "ema"));
}

TEST(RuleOptimizer, ScalesGradientsFirst) {
  const auto optimizer = make_optimizer(adam(OptimizerType::kAdamW));
  // five_steps divides the gradients by `gradient_scale`, and the optimizer multiplies them by it. With a power of two,
  // both operations are exact, so the results have the same bits.
  EXPECT_EQ(five_steps(*optimizer, {.lr = 0.01f}), five_steps(*optimizer, {.gradient_scale = 0.125f, .lr = 0.01f}));
}

// The expected values are those of torch.nn.utils.clip_grad_value_ before torch.optim.SGD. The limit applies to the
// scaled gradient.
TEST(RuleOptimizer, GradientsAreClippedAtAValue) {
  const auto optimizer = make_optimizer({.type = OptimizerType::kSgd, .weight_decay = 0.0});
  const std::vector<float> torch = {0.4299999475479126f, -1.1950000524520874f, 2.946499824523926f,
                                    0.0008500000694766641f, -0.032499998807907104f};
  EXPECT_THAT(five_steps(*optimizer, {.clip_value = 0.15f, .lr = 0.1f}), Pointwise(FloatNear(1e-6f), torch));
  EXPECT_THAT(five_steps(*optimizer, {.gradient_scale = 0.125f, .clip_value = 0.15f, .lr = 0.1f}),
              Pointwise(FloatNear(1e-6f), torch));
}

TEST(RuleOptimizer, ClippingKeepsNaN) {
  const auto optimizer = make_optimizer({.type = OptimizerType::kSgd, .weight_decay = 0.0});
  Trained run{*optimizer, {1.0f, 1.0f}};
  run.step({NAN, HUGE_VALF}, {.clip_value = 0.5f, .lr = 1.0f});
  EXPECT_TRUE(std::isnan(run.weights[0]));
  EXPECT_EQ(run.weights[1], 0.5f);
}

/// The average of a parameter that the run's first step updates begins as a copy of the new weights. The average of any
/// other parameter begins at the weights that the parameter has before its first update.
TEST(Average, BeginsAsTheFirstStepsWeightsOrTheOldOnes) {
  const auto optimizer = make_optimizer(adam(OptimizerType::kAdamW), {.decay = 0.9});
  for (const bool is_first_of_run : {true, false}) {
    Trained run{*optimizer, {0.5f, -2.0f}};
    run.states[2] = {77.0f, 77.0f};  // old values in the state must have no effect
    std::vector<double> wanted = {0.5, -2.0};
    for (int t = 1; t <= 50; ++t) {
      const bool copies = t == 1 && is_first_of_run;
      run.step({std::sin(0.2f * static_cast<float>(t)), 0.1f}, {.lr = 0.05f, .is_first_of_run = copies});
      for (std::size_t i = 0; i < 2; ++i) {
        wanted[i] = copies ? run.weights[i] : 0.9 * wanted[i] + 0.1 * static_cast<double>(run.weights[i]);
        ASSERT_NEAR(run.states[2][i], wanted[i], copies ? 0 : 1e-6) << "step " << t;
      }
    }
  }
}

TEST(Average, AveragingChangesNoWeight) {
  const auto alone = make_optimizer(adam(OptimizerType::kAdamW));
  const auto averaged = make_optimizer(adam(OptimizerType::kAdamW), {.decay = 0.9});
  EXPECT_EQ(five_steps(*alone, {.lr = 0.01f}), five_steps(*averaged, {.lr = 0.01f}));
}

TEST(Average, AverageMovesWithoutAStepAndSwapsWithTheWeights) {
  for (const WeightFormat weights : {WeightFormat::kF32, WeightFormat::kF32AndF16, WeightFormat::kSplitBF16}) {
    for (const InstructionSet set : {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
      if (!supports(set)) continue;
      const RuleOptimizer optimizer(adam(OptimizerType::kAdamW), {.decay = 0.75}, set);
      StepProblem before(1031, 3, false, {weights, optimizer}), after = before;
      optimizer.average(after.slice(0, 1031));
      const std::vector<float> masters = before.masters();
      for (std::size_t i = 0; i < masters.size(); ++i) {
        float old = 0, got = 0;
        std::memcpy(&old, &before.state[2][4 * i], 4);
        std::memcpy(&got, &after.state[2][4 * i], 4);
        ASSERT_EQ(got, old + (masters[i] - old) * 0.25f) << i;
      }
      after.state[2] = before.state[2];
      EXPECT_TRUE(same_bits(before, after));

      optimizer.swap_average(after.slice(0, 1031));
      const std::vector<float> swapped = after.masters();
      EXPECT_EQ(std::memcmp(swapped.data(), before.state[2].data(), 4 * 1031), 0);
      EXPECT_EQ(std::memcmp(masters.data(), after.state[2].data(), 4 * 1031), 0);
      optimizer.swap_average(after.slice(0, 1031));
      EXPECT_TRUE(same_bits(before.masters(), after.masters()) && same_bits(before.state[2], after.state[2]));
    }
  }
}

TEST(Power, PowersOfTwoAreExactAndOthersClose) {
  EXPECT_EQ(power(0.5, 10), std::ldexp(1.0, -10));
  EXPECT_EQ(power(0.9, 0), 1.0);
  EXPECT_NEAR(power(0.999, 100000), std::pow(0.999, 100000), 1e-55);
}

}  // namespace
}  // namespace tessera
