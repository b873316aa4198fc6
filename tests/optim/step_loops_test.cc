#include "optim/step_loops.h"

#include <gtest/gtest.h>

#include "optim/adamw.h"
#include "optim/sgd.h"
#include "tests/optim/step_problem.h"

namespace tessera {
namespace {

constexpr std::size_t kNumel = 1031;  // prime: every vector width leaves a tail
constexpr DType kDTypes[] = {DType::kF64 /* none */, DType::kF32, DType::kBF16, DType::kF16};

struct Case {
  std::string name;
  OptimizerConfig config;
  std::int64_t step;
};

std::vector<Case> cases() {
  OptimizerConfig adamw{.type = OptimizerType::kAdamW, .weight_decay = 0.1};
  OptimizerConfig adam{.type = OptimizerType::kAdam, .weight_decay = 0.1};
  OptimizerConfig sgd{.type = OptimizerType::kSgd, .weight_decay = 0.1};
  OptimizerConfig momentum = sgd;
  momentum.momentum = 0.9;
  momentum.dampening = 0.25;
  OptimizerConfig nesterov = sgd;
  nesterov.momentum = 0.9;
  nesterov.nesterov = true;
  return {{"adamw", adamw, 7},           {"adamw_first", adamw, 1}, {"adam", adam, 7},
          {"sgd", sgd, 7},               {"momentum", momentum, 7}, {"momentum_first", momentum, 1},
          {"nesterov", nesterov, 7},     {"nesterov_first", nesterov, 1}};
}

std::unique_ptr<Optimizer> make(const OptimizerConfig& config, InstructionSet set) {
  if (config.type == OptimizerType::kSgd) return std::make_unique<Sgd>(config, set);
  return std::make_unique<AdamW>(config, set);
}

void step(const Optimizer& optimizer, StepProblem& problem, std::size_t begin, std::size_t end, DType dtype,
          std::int64_t step) {
  optimizer.step({.gradient_scale = 0.3f, .lr = 1e-2f, .step = step},
                 problem.slice(begin, end, dtype, optimizer.num_states()));
}

TEST(StepLoops, EveryInstructionSetGivesTheSameBits) {
  for (const Case& test : cases()) {
    for (DType dtype : kDTypes) {
      StepProblem wanted(kNumel, 1, true);
      step(*make(test.config, InstructionSet::kPortable), wanted, 0, kNumel, dtype, test.step);
      for (InstructionSet set : {InstructionSet::kAvx2, InstructionSet::kAvx512}) {
        if (!supports(set)) continue;
        StepProblem got(kNumel, 1, true);
        step(*make(test.config, set), got, 0, kNumel, dtype, test.step);
        EXPECT_TRUE(same_bits(wanted, got)) << test.name << " on " << name_of(set) << " into " << name_of(dtype);
      }
    }
  }
}

TEST(StepLoops, AnyCutIntoShardsGivesTheSameBits) {
  std::mt19937 random(2);
  for (const Case& test : cases()) {
    for (DType dtype : kDTypes) {
      const auto optimizer = make_optimizer(test.config);
      StepProblem whole(kNumel, 3, true);
      step(*optimizer, whole, 0, kNumel, dtype, test.step);
      for (int trial = 0; trial < 20; ++trial) {
        StepProblem cut(kNumel, 3, true);
        for (std::size_t begin = 0; begin < kNumel;) {  // shards of 1 to 100: every offset and every tail
          const std::size_t end = std::min(kNumel, begin + 1 + random() % 100);
          step(*optimizer, cut, begin, end, dtype, test.step);
          begin = end;
        }
        ASSERT_TRUE(same_bits(whole, cut)) << test.name << " into " << name_of(dtype) << ", trial " << trial;
      }
    }
  }
}

TEST(StepLoops, MasterDoesNotDependOnTheParameterDtype) {
  for (const Case& test : cases()) {
    const auto optimizer = make_optimizer(test.config);
    StepProblem alone(kNumel, 4, false);
    step(*optimizer, alone, 0, kNumel, DType::kF64, test.step);
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      StepProblem rounded(kNumel, 4, false);
      step(*optimizer, rounded, 0, kNumel, dtype, test.step);
      EXPECT_TRUE(same_bits(alone.master, rounded.master)) << test.name;
      EXPECT_TRUE(same_bits(alone.state0, rounded.state0)) << test.name;
      if (dtype != DType::kF32) continue;
      EXPECT_TRUE(same_bits(rounded.master, rounded.full)) << test.name;
    }
  }
}

TEST(StepLoops, WritesNothingOutsideItsSlice) {
  StepProblem before(kNumel, 5, false);
  StepProblem after = before;
  step(*make_optimizer({}), after, 100, 133, DType::kBF16, 3);
  for (std::size_t i = 0; i < kNumel; ++i) {
    const bool inside = i >= 100 && i < 133;
    EXPECT_EQ(inside, std::memcmp(&before.state0[i], &after.state0[i], 4) != 0) << i;
    if (inside) continue;
    EXPECT_EQ(before.half[i], after.half[i]) << i;
  }
}

TEST(StepLoops, RefusesSpansOfWrongLengthByName) {
  StepProblem problem(10, 6, false);
  OptimizerSlice slice = problem.slice(0, 10, DType::kF64, 2);
  slice.state1 = slice.state1.first(9);
  try {
    make_optimizer({})->step({}, slice);
    FAIL() << "a short state1 was accepted";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "adamw: the slice's state1 wants 10 elements, got 9");
  }
  OptimizerSlice integers = problem.slice(0, 10, DType::kF32, 2);
  integers.parameter_dtype = DType::kI32;
  EXPECT_THROW(make_optimizer({})->step({}, integers), std::invalid_argument);
}

}  // namespace
}  // namespace tessera
