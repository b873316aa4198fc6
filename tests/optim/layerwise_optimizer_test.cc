// Tests the update rules that have a ratio for each layer. They give the same bits for every instruction set and every
// division.

#include "optim/layerwise_optimizer.h"

#include <gtest/gtest.h>

#include "tests/optim/step_problem.h"

namespace tessera {
namespace {

constexpr std::size_t kLayerNumel = 5003;
constexpr WeightFormat kFormatsOfLayers[] = {WeightFormat::kF32, WeightFormat::kF32AndF32, WeightFormat::kF32AndBF16,
                                             WeightFormat::kF32AndF16, WeightFormat::kSplitBF16};

std::vector<OptimizerConfig> configs() {
  std::vector<OptimizerConfig> all;
  for (const StateDType states : {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit}) {
    all.push_back({.type = OptimizerType::kLamb, .weight_decay = 0.1, .state_dtype = states});
    all.push_back({.type = OptimizerType::kLars, .weight_decay = 0.1, .momentum = 0.9, .state_dtype = states});
    all.back().nesterov = states == StateDType::kBF16;
  }
  all.push_back({.type = OptimizerType::kLars, .weight_decay = 0.1});
  return all;
}

/// The results of both passes over [begin, end), and the values that the first pass measures.
struct Passes {
  std::vector<float> weights, directions;

  void run(const LayerwiseOptimizer& optimizer, StepProblem& problem, std::size_t begin, std::size_t end) {
    const StepScalars scalars{.gradient_scale = 0.3f, .lr = 1e-2f, .step = 7};
    const OptimizerSlice slice = problem.slice(begin, end);
    const std::span<float> gradient = std::span(problem.gradient).subspan(begin, end - begin);
    optimizer.measure(scalars, slice, gradient, [&](std::size_t, auto weights_seen, auto directions_seen) {
      weights.insert(weights.end(), weights_seen.begin(), weights_seen.end());
      directions.insert(directions.end(), directions_seen.begin(), directions_seen.end());
    });
    optimizer.step(scalars, slice);
  }
};

void for_each_case(const std::function<void(const OptimizerConfig&, WeightFormat)>& body) {
  for (const OptimizerConfig& config : configs()) {
    for (const WeightFormat weights : kFormatsOfLayers) {
      SCOPED_TRACE(name_of(config.type) + ", states " + name_of(config.state_dtype) + ", weight format " +
                   std::to_string(static_cast<int>(weights)));
      body(config, weights);
    }
  }
}

TEST(LayerwiseOptimizer, EveryInstructionSetAndCutGivesTheSameBits) {
  for_each_case([](const OptimizerConfig& config, WeightFormat weights) {
    const LayerwiseOptimizer portable(config, {.decay = 0.9}, InstructionSet::kPortable);
    StepProblem wanted(kLayerNumel, 1, true, {weights, portable});
    Passes wanted_passes;
    const std::vector<float> before = wanted.masters();
    wanted_passes.run(portable, wanted, 0, kLayerNumel);
    EXPECT_TRUE(same_bits(wanted_passes.weights, before));
    EXPECT_EQ(wanted_passes.directions.size(), portable.makes_directions() ? kLayerNumel : 0);
    for (const InstructionSet set : {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
      if (!supports(set)) continue;
      const LayerwiseOptimizer optimizer(config, {.decay = 0.9}, set);
      StepProblem got(kLayerNumel, 1, true, {weights, optimizer});
      Passes passes;
      for (std::size_t begin = 0; begin < kLayerNumel; begin += 768) {
        passes.run(optimizer, got, begin, std::min(kLayerNumel, begin + 768));
      }
      EXPECT_TRUE(same_bits(wanted, got)) << name_of(set);
      EXPECT_TRUE(same_bits(wanted_passes.directions, passes.directions)) << name_of(set);
    }
  });
}

TEST(LayerwiseOptimizer, StepOverAPartLeavesTheRest) {
  for_each_case([](const OptimizerConfig& config, WeightFormat weights) {
    const LayerwiseOptimizer optimizer(config);
    const StepScalars scalars{.gradient_scale = 0.3f, .lr = 1e-2f, .step = 7};
    StepProblem before(kLayerNumel, 2, false, {weights, optimizer});
    StepProblem whole = before, part = before;
    optimizer.step(scalars, whole.slice(0, kLayerNumel));
    optimizer.step(scalars, part.slice(0, kLayerNumel), 512, 300);
    const std::vector<float> old = before.masters(), all = whole.masters(), some = part.masters();
    for (std::size_t i = 0; i < kLayerNumel; ++i) {
      const bool is_in = i >= 512 && i < 812;
      EXPECT_EQ(some[i], is_in ? all[i] : old[i]) << i;
    }
    EXPECT_FALSE(same_bits(old, some));
  });
}

TEST(LayerwiseOptimizer, TrustRatiosEqualThePapersFormulas) {
  const LayerwiseOptimizer lamb({.type = OptimizerType::kLamb});
  const LayerwiseOptimizer lars(
      {.type = OptimizerType::kLars, .eps = 0.5, .weight_decay = 0.25, .trust_coefficient = 0.1});
  EXPECT_EQ(lamb.trust_ratio(3, 4), 0.75);
  EXPECT_DOUBLE_EQ(lars.trust_ratio(4, 3), 0.1 * 4 / (3 + 1 + 0.5));
  for (const LayerwiseOptimizer* optimizer : {&lamb, &lars}) {
    EXPECT_EQ(optimizer->trust_ratio(0, 4), 1);
    EXPECT_EQ(optimizer->trust_ratio(4, 0), 1);
    EXPECT_EQ(optimizer->trust_ratio(NAN, 1), 1);
  }
}

}  // namespace
}  // namespace tessera
