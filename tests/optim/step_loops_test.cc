// Tests the loops that update elements. They give the same bits for every instruction set, every division into shards,
// and every form of the masters.

#include "optim/loops/step_loops.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "optim/rule_optimizer.h"
#include "runtime/config/strategy_names.h"
#include "tests/optim/step_problem.h"

namespace tessera {
namespace {

constexpr std::size_t kNumel = 1031;  // a prime number: every vector width leaves a tail
constexpr WeightFormat kWeightFormats[] = {WeightFormat::kF32, WeightFormat::kF32AndF32, WeightFormat::kF32AndBF16,
                                           WeightFormat::kF32AndF16, WeightFormat::kSplitBF16};

struct Case {
  std::string name;
  OptimizerConfig config;
  std::int64_t step;
  EmaConfig ema = {};
  float clip_value = 0.0f;
};

OptimizerConfig config_of(OptimizerType type, double momentum = 0.0) {
  return {.type = type, .weight_decay = 0.1, .momentum = momentum};
}

std::vector<Case> formulas() {
  using enum OptimizerType;
  OptimizerConfig momentum = config_of(kSgd, 0.9), nesterov = momentum, adagrad = config_of(kAdagrad),
                  frozen = config_of(kAdamW);
  momentum.dampening = 0.25;
  nesterov.nesterov = true;
  adagrad.lr_decay = 0.01;
  frozen.freeze_step = 6;
  return {{"adamw", config_of(kAdamW), 7},
          {"adamw_first", config_of(kAdamW), 1},
          {"adamw_frozen", frozen, 7},
          {"adam", config_of(kAdam), 7},
          {"sgd", config_of(kSgd), 7},
          {"momentum", momentum, 7},
          {"momentum_first", momentum, 1},
          {"nesterov", nesterov, 7},
          {"nesterov_first", nesterov, 1},
          {"lion", config_of(kLion), 7},
          {"adagrad", adagrad, 7},
          {"rmsprop", config_of(kRmsprop), 7},
          {"rmsprop_momentum", config_of(kRmsprop, 0.9), 7},
          {"adamw_average", config_of(kAdamW), 7, {0.99}},
          {"adamw_average_first", config_of(kAdamW), 1, {0.99}},
          {"sgd_average", config_of(kSgd), 7, {0.99}},
          {"adamw_clipped", config_of(kAdamW), 7, {}, 1e-3f},
          {"rmsprop_average_clipped", config_of(kRmsprop, 0.9), 7, {0.9}, 1e-3f}};
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (StateDType states : {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit}) {
    for (Case formula : formulas()) {
      formula.name += " with states in " + name_of(states);
      formula.config.state_dtype = states;
      all.push_back(formula);
    }
  }
  for (const double momentum : {0.0, 0.9}) {
    all.push_back({"rmsprop_centered", config_of(OptimizerType::kRmsprop, momentum), 7});
    all.back().config.centered = true;
  }
  return all;
}

RuleOptimizer make(const Case& test, InstructionSet set = best_instruction_set()) {
  return RuleOptimizer(test.config, test.ema, set);
}

void step(const Optimizer& optimizer, const Case& test, StepProblem& problem, std::size_t begin, std::size_t end,
          std::int64_t step) {
  optimizer.step({.gradient_scale = 0.3f, .clip_value = test.clip_value, .lr = 1e-2f, .step = step},
                 problem.slice(begin, end));
}

void for_each_case(const std::function<void(const Case&, Formats)>& body) {
  for (const Case& test : cases()) {
    for (WeightFormat weights : kWeightFormats) {
      SCOPED_TRACE(test.name + ", weight format " + std::to_string(static_cast<int>(weights)));
      body(test, {weights, make(test)});
    }
  }
}

TEST(StepLoops, EveryInstructionSetGivesTheSameBits) {
  for_each_case([](const Case& test, Formats formats) {
    for (const std::size_t numel : std::initializer_list<std::size_t>{1, 15, 255, 256, 257, 512, 767, kNumel}) {
      StepProblem wanted(numel, 1, true, formats);
      step(make(test, InstructionSet::kPortable), test, wanted, 0, numel, test.step);
      for (InstructionSet set : {InstructionSet::kAvx2, InstructionSet::kAvx512}) {
        if (!supports(set)) continue;
        StepProblem got(numel, 1, true, formats);
        step(make(test, set), test, got, 0, numel, test.step);
        EXPECT_TRUE(same_bits(wanted, got)) << numel << " elements, " << name_of(set);
      }
    }
  });
}

// Scales lie near both ends of the range in which the loops compute. Some of them lie beyond the range after the step.
TEST(StepLoops, BlocksOfExtremeScalesGiveTheSameBits) {
  constexpr int kExponents[] = {-113, -112, -111, -75, 63, 123, 124, 125};
  constexpr std::size_t kCount = std::size(kExponents) * kStateBlock;
  for (OptimizerType type : {OptimizerType::kLion, OptimizerType::kAdamW}) {
    Case test{name_of(type), config_of(type), 7};
    test.config.state_dtype = StateDType::k8Bit;
    const auto stepped = [&](InstructionSet set) {
      StepProblem problem(kCount, 8, false, {WeightFormat::kF32, make(test)});
      for (float& g : problem.gradient) g = 0.0f;
      for (std::size_t b = 0; b < std::size(kExponents); ++b) problem.scales[0][b] = std::ldexp(1.2f, kExponents[b]);
      step(make(test, set), test, problem, 0, kCount, test.step);
      return problem;
    };
    const StepProblem wanted = stepped(InstructionSet::kPortable);
    const std::vector<float>& scales = wanted.scales[0];
    EXPECT_EQ(scales[0], 0.0f);
    EXPECT_TRUE(scales[1] > 0x1p-112f && scales[1] < 0x1p-111f) << scales[1];
    EXPECT_TRUE(scales[6] > 0x1p124f && scales[6] < 0x1p125f) << scales[6];
    EXPECT_TRUE(std::isnan(scales[7]));
    for (InstructionSet set : {InstructionSet::kAvx2, InstructionSet::kAvx512}) {
      if (!supports(set)) continue;
      EXPECT_TRUE(same_bits(wanted, stepped(set))) << test.name << ", " << name_of(set);
    }
  }
}

// Zero would result if the upper half of a NaN whose payload is all ones were rounded up.
TEST(StepLoops, NoNoiseTurnsANaNIntoANumber) {
  for_each_case([](const Case& test, Formats formats) {
    if (test.config.state_dtype != StateDType::kBF16 || test.clip_value > 0) return;
    for (InstructionSet set : {InstructionSet::kPortable, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
      if (!supports(set)) continue;
      StepProblem problem(kNumel, 6, false, formats);
      for (std::size_t i = 0; i < kNumel; i += 2) {
        problem.gradient[i] = std::bit_cast<float>(i % 4 == 0 ? 0x7fffffffu : 0xffffffffu);
      }
      step(make(test, set), test, problem, 0, kNumel, test.step);
      for (std::size_t k = 0; k < formats.states.size(); ++k) {
        if (formats.states[k].dtype != StateDType::kBF16) continue;
        if (test.config.freeze_step > 0 && formats.states[k].name == "exp_avg_sq") continue;  // frozen: ignores NaN
        for (std::size_t i = 0; i < kNumel; ++i) {
          std::uint16_t half;
          std::memcpy(&half, &problem.state[k][2 * i], 2);
          const bool is_nan = (half & 0x7fff) > 0x7f80;
          ASSERT_EQ(is_nan, i % 2 == 0) << formats.states[k].name << " of element " << i << ", " << name_of(set);
        }
      }
    }
  });
}

TEST(StepLoops, AnyCutIntoShardsGivesTheSameBits) {
  std::mt19937 random(2);
  for_each_case([&](const Case& test, Formats formats) {
    // Shards have 1 to 100 elements, so every offset and every tail occurs. Shards with 8-bit states have whole blocks.
    const std::size_t unit = formats.has_blocks() ? kStateBlock : 1;
    const RuleOptimizer optimizer = make(test);
    StepProblem whole(kNumel, 3, true, formats);
    step(optimizer, test, whole, 0, kNumel, test.step);
    for (int trial = 0; trial < 8; ++trial) {
      StepProblem cut(kNumel, 3, true, formats);
      for (std::size_t begin = 0; begin < kNumel;) {
        const std::size_t end = std::min(kNumel, begin + unit * (1 + random() % (unit == 1 ? 100 : 3)));
        step(optimizer, test, cut, begin, end, test.step);
        begin = end;
      }
      ASSERT_TRUE(same_bits(whole, cut)) << "trial " << trial;
    }
  });
}

TEST(StepLoops, MasterDoesNotDependOnItsFormOrTheParametersDtype) {
  for_each_case([](const Case& test, Formats formats) {
    const RuleOptimizer optimizer = make(test);
    StepProblem alone(kNumel, 4, false, {WeightFormat::kF32, optimizer}), other(kNumel, 4, false, formats);
    for (int i = 0; i < 20; ++i) {
      step(optimizer, test, alone, 0, kNumel, test.step + i);
      step(optimizer, test, other, 0, kNumel, test.step + i);
    }
    EXPECT_TRUE(same_bits(alone.masters(), other.masters()));
    for (std::size_t i = 0; i < kMostStates; ++i) EXPECT_TRUE(same_bits(alone.state[i], other.state[i])) << i;
  });
}

std::uint16_t nearest_bf16(float x) { return static_cast<std::uint16_t>(bf16_nearest<std::uint32_t>(x)); }
std::uint16_t nearest_fp16(float x) { return static_cast<std::uint16_t>(fp16_nearest<std::uint32_t>(x)); }

TEST(StepLoops, WritesTheParameterInItsDtype) {
  for (WeightFormat weights : kWeightFormats) {
    const RuleOptimizer optimizer({});
    StepProblem problem(kNumel, 4, true, {weights, optimizer});
    step(optimizer, {}, problem, 0, kNumel, 3);
    const std::vector<float> masters = problem.masters();
    for (std::size_t i = 0; i < kNumel; ++i) {
      const bool tie = (std::bit_cast<std::uint32_t>(masters[i]) & 0xffff) == 0x8000;
      const bool is_bf16 = weights == WeightFormat::kF32AndBF16 || (weights == WeightFormat::kSplitBF16 && !tie);
      EXPECT_TRUE(weights != WeightFormat::kF32AndF32 || std::memcmp(&problem.copy[i], &masters[i], 4) == 0) << i;
      EXPECT_TRUE(weights != WeightFormat::kF32AndF16 || problem.half[i] == nearest_fp16(masters[i])) << i;
      EXPECT_TRUE(!is_bf16 || problem.half[i] == nearest_bf16(masters[i])) << i;
    }
  }
}

TEST(StepLoops, WritesNothingOutsideItsSlice) {
  for (StateDType states : {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit}) {
    for (WeightFormat weights : kWeightFormats) {
      const RuleOptimizer optimizer({.state_dtype = states}, {.decay = 0.9});
      StepProblem before(kNumel, 5, false, {weights, optimizer});
      StepProblem after = before;
      const std::size_t begin = 256, end = 512 + 33;
      step(optimizer, {}, after, begin, end, 3);
      for (std::size_t i = 0; i < kNumel; ++i) {
        if (i >= begin && i < end) continue;
        for (int s = 0; s < 3; ++s) {
          const std::size_t state_size = before.state[s].size() / kNumel;
          EXPECT_EQ(std::memcmp(&before.state[s][i * state_size], &after.state[s][i * state_size], state_size), 0) << i;
        }
        EXPECT_EQ(before.half[i], after.half[i]) << i;
        EXPECT_EQ(before.low[i], after.low[i]) << i;
        EXPECT_EQ(before.master[i], after.master[i]) << i;
        EXPECT_EQ(before.copy[i], after.copy[i]) << i;
      }
      EXPECT_FALSE(same_bits(before.masters(), after.masters()));
    }
  }
}

std::string refusal(const OptimizerConfig& config, const OptimizerSlice& slice) {
  try {
    make_optimizer(config)->step({}, slice);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(StepLoops, PartsThatDoNotFitAreRefusedByName) {
  StepProblem problem(512, 6, false);
  const OptimizerSlice good = problem.slice(0, 512);
  OptimizerSlice slice = good;
  slice.states[1].data = slice.states[1].data.first(9);
  EXPECT_EQ(refusal({}, slice), "adamw: the slice's exp_avg_sq wants 2048 bytes, got 9");
  slice = good;
  slice.master = slice.master.first(9);
  EXPECT_EQ(refusal({}, slice), "adamw: the slice's master wants 512 elements, got 9");
  slice = good;
  slice.low = problem.low;
  EXPECT_EQ(refusal({}, slice), "adamw: the slice's low wants 0 elements, got 512");
  slice = good;
  slice.parameter = problem.half.data();
  slice.parameter_dtype = DType::kI32;
  EXPECT_EQ(refusal({}, slice), "adamw: parameters can be fp32, bf16 or fp16, got int32");
  EXPECT_EQ(refusal({.state_dtype = StateDType::kBF16}, good), "adamw: the slice's exp_avg wants 1024 bytes, got 2048");
  EXPECT_EQ(refusal({}, good), "accepted");
}

TEST(StepLoops, RefusesSplitMastersWithoutTheirParameter) {
  StepProblem problem(512, 6, false, {WeightFormat::kSplitBF16, RuleOptimizer({})});
  OptimizerSlice slice = problem.slice(0, 512);
  EXPECT_EQ(refusal({}, slice), "accepted");
  slice.parameter_dtype = DType::kF16;
  EXPECT_THAT(refusal({}, slice), ::testing::HasSubstr("a split master needs its bf16 parameter, got fp16"));
  slice = problem.slice(0, 512);
  slice.parameter = nullptr;
  EXPECT_THAT(refusal({}, slice), ::testing::HasSubstr("a split master needs its bf16 parameter"));
}

TEST(StepLoops, RefusesBlocksThatAreNotWhole) {
  StepProblem problem(512, 6, false, {WeightFormat::kF32, RuleOptimizer({.state_dtype = StateDType::k8Bit})});
  OptimizerSlice slice = problem.slice(0, 512);
  slice.first_element = 128;
  EXPECT_EQ(refusal({.state_dtype = StateDType::k8Bit}, slice),
            "adamw: a slice with 8-bit states begins at a multiple of 256 elements, got 128");
  slice = problem.slice(0, 512);
  slice.states[0].scales = slice.states[0].scales.first(1);
  EXPECT_EQ(refusal({.state_dtype = StateDType::k8Bit}, slice),
            "adamw: the slice's exp_avg scales wants 8 bytes, got 4");
}

}  // namespace
}  // namespace tessera
