// Compares the CUDA kernels with the CPU's loops. The bits are the same.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "optim/loss_scale.h"
#include "optim/step_decision.h"
#include "tests/optim/device_problem.h"

namespace tessera {
namespace device_kernels_test {

void expect_the_cpus_bits(const OptimizerConfig& config, WeightFormat weights, std::size_t begin, std::size_t end,
                          const EmaConfig& ema = {}, float clip_value = 0.0f, unsigned most_blocks = cuda::kAnyBlocks) {
  SCOPED_TRACE("rule " + std::to_string(static_cast<int>(config.type)) + ", weights " +
               std::to_string(static_cast<int>(weights)) + ", states " +
               std::to_string(static_cast<int>(config.state_dtype)) + ", elements " + std::to_string(begin) + " to " +
               std::to_string(end));
  const RuleOptimizer cpu(config, ema);
  StepProblem problem = finite_problem(end, {weights, cpu}), got = problem;
  const DeviceProblem device(problem);
  DeviceRun run = device.run(cpu, problem, begin, end);
  run.arguments.clip_value = clip_value;
  QueuedStep step;
  for (std::int64_t t = 1; t <= 3; ++t) {
    cpu.step({.gradient_scale = 0.25f, .clip_value = clip_value, .lr = 0.01f, .step = t, .is_first_of_run = t == 1},
             problem.slice(begin, end));
    step.decide(request_of(cpu, 0.01, 4));
    check(cuda::update_step(run, step.tables, nullptr, most_blocks));
  }
  // No rank used the parameter, so only its average changes.
  step.used.set(0, 0);
  cpu.average(problem.slice(begin, end));
  step.decide(request_of(cpu, 0.01, 4));
  check(cuda::update_step(run, step.tables, nullptr, most_blocks));
  device.read_back(got);
  EXPECT_TRUE(same_bits(got, problem));
  EXPECT_EQ(step.decision.values()[0].so_far.applied, 4);
  EXPECT_EQ(step.steps.values()[0], 3);
}

TEST_F(DeviceKernels, AdamGivesTheCpusBitsInEveryFormat) {
  for (WeightFormat weights : kWeights)
    for (StateDType states : kStates)
      for (std::size_t numel : {1u, 7u, 8u, 255u, 256u, 2051u}) expect_the_cpus_bits(adamw(states), weights, 0, numel);
}

/// If states have 8 bits, a warp copies the next block while it computes one.
TEST_F(DeviceKernels, WarpComputesManyBlocksInTurn) {
  using enum OptimizerType;
  for (const OptimizerType type : {kAdam, kAdamW, kSgd, kLion, kRmsprop}) {
    OptimizerConfig config{.type = type, .weight_decay = 0.1, .momentum = 0.9, .state_dtype = StateDType::k8Bit};
    if (type != kSgd && type != kRmsprop) config.momentum = 0;
    for (const WeightFormat weights : {WeightFormat::kF32, WeightFormat::kF32AndBF16, WeightFormat::kSplitBF16}) {
      for (const std::size_t numel : {256u * 8 * 5, 256u * 8 * 4 + 256 * 3, 256u * 8 * 3 + 1000}) {
        expect_the_cpus_bits(config, weights, 0, numel, {}, 0.0f, /*most_blocks=*/1);
      }
    }
  }
  expect_the_cpus_bits(adamw(StateDType::kBF16), WeightFormat::kSplitBF16, 0, 20011, {}, 0.0f, 2);
}

TEST_F(DeviceKernels, FrozenSecondMomentsGiveTheCpusBitsInEveryFormat) {
  for (const OptimizerType type : {OptimizerType::kAdamW, OptimizerType::kAdam}) {
    for (WeightFormat weights : kWeights) {
      for (StateDType states : kStates) {
        OptimizerConfig config = adamw(states);
        config.type = type;
        config.freeze_step = 1;
        expect_the_cpus_bits(config, weights, 0, 2051);
      }
    }
  }
}

TEST_F(DeviceKernels, EveryRuleGivesTheCpusBitsInEveryFormat) {
  using enum OptimizerType;
  std::vector<OptimizerConfig> configs;
  for (const OptimizerType type : {kSgd, kLion, kAdagrad, kRmsprop}) {
    configs.push_back({.type = type, .weight_decay = 0.1, .lr_decay = 0.1});
    if (type != kSgd && type != kRmsprop) continue;
    configs.push_back({.type = type, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.25});
  }
  for (WeightFormat weights : kWeights) {
    for (OptimizerConfig config : configs) {
      for (StateDType states : kStates) {
        config.state_dtype = states;
        expect_the_cpus_bits(config, weights, 0, 2051);
      }
    }
    expect_the_cpus_bits({.type = kRmsprop, .centered = true}, weights, 0, 2051);
    expect_the_cpus_bits({.type = kRmsprop, .momentum = 0.9, .centered = true}, weights, 0, 2051);
  }
}

TEST_F(DeviceKernels, AveragesAndClippingGiveTheCpusBits) {
  for (WeightFormat weights : kWeights) {
    for (StateDType states : kStates) expect_the_cpus_bits(adamw(states), weights, 0, 2051, {.decay = 0.9});
    expect_the_cpus_bits(adamw(), weights, 256, 2051, {}, 1e-3f);
    expect_the_cpus_bits({.type = OptimizerType::kSgd}, weights, 0, 300, {.decay = 0.9}, 1e-3f);
  }
}

TEST_F(DeviceKernels, ParameterMayBeginInsideABlock) {
  OptimizerConfig adam = adamw();
  adam.type = OptimizerType::kAdam;
  expect_the_cpus_bits(adam, WeightFormat::kF32, 32, 1000);
  adam.state_dtype = StateDType::kBF16;
  expect_the_cpus_bits(adam, WeightFormat::kSplitBF16, 96, 5000);
  adam.state_dtype = StateDType::k8Bit;
  expect_the_cpus_bits(adam, WeightFormat::kF32AndBF16, 512, 1111);
}

TEST_F(DeviceKernels, UnalignedRunIsRefused) {
  const RuleOptimizer optimizer(adamw());
  StepProblem problem(100, 7, false, {WeightFormat::kF32, optimizer});
  const DeviceProblem device(problem);
  QueuedStep step;
  EXPECT_EQ(cuda::update_step(device.run(optimizer, problem, 1, 100), step.tables, nullptr),
            cudaErrorMisalignedAddress);
  DeviceRun moved = device.run(optimizer, problem, 0, 100);
  moved.first_element = 8;
  EXPECT_EQ(cuda::update_step(moved, step.tables, nullptr), cudaErrorMisalignedAddress);
}

TEST_F(DeviceKernels, NonFiniteNormSkipsTheStepAndCountsIt) {
  const RuleOptimizer optimizer(adamw());
  StepProblem problem(300, 7, false, {WeightFormat::kF32, optimizer});
  const DeviceProblem device(problem);
  QueuedStep step;
  for (double sum : {1.0, static_cast<double>(NAN), HUGE_VAL, 1.0}) {
    step.sum.set(0, sum);
    step.decide(request_of(optimizer, 0.01));
    const StepDecision decision = step.decision.values()[0];
    EXPECT_EQ(decision.is_skipped, std::isfinite(sum) ? 0 : 1);
    EXPECT_EQ(decision.is_overflow, decision.is_skipped);
    if (std::isfinite(sum)) continue;
    const std::vector<float> before = device.master.values();
    check(cuda::update_step(device.run(optimizer, problem, 0, 300), step.tables, nullptr));
    EXPECT_TRUE(same_bits(device.master.values(), before));
  }
  EXPECT_EQ(step.decision.values()[0].so_far.applied, 2);
  EXPECT_EQ(step.decision.values()[0].so_far.skipped, 2);
  EXPECT_EQ(step.steps.values()[0], 2);
}

TEST_F(DeviceKernels, DecisionClipsAndFoldsConstantsAsOnTheCpu) {
  constexpr int kParameters = 700;  // a thread block has fewer threads than this
  QueuedStep step({{0, 3}, {3, kParameters - 3}}, 1024.0f);
  step.used.set(3, 0);
  for (int p = 3; p < kParameters; ++p) step.steps.set(p, p);
  step.sum.set(0, 1e6);
  const RuleOptimizer optimizer(adamw());
  step.decide(request_of(optimizer, 3e-4, 3, 0.125));
  const double mean = 1.0 / (3 * 1024.0), norm = std::sqrt(1e6) * mean;
  const auto scale = static_cast<float>(mean * (0.125 / (norm + 1e-6)));
  const StepDecision decision = step.decision.values()[0];
  EXPECT_EQ(decision.grad_norm, norm);
  EXPECT_EQ(decision.gradient_scale, scale);
  EXPECT_EQ(decision.loss_scale, 1024.0f);
  EXPECT_EQ(decision.lr, 3e-4);
  for (int p = 0; p < kParameters; ++p) {
    const std::int64_t steps = p < 3 ? 1 : p == 3 ? 3 : p + 1;
    EXPECT_EQ(step.steps.values()[p], steps);
    const AdamConstants wanted = p == 3 ? AdamConstants{} : AdamRule::constants(optimizer.numbers(), steps, 3e-4f);
    const AdamConstants got = constants_for(step.constants.values()[p], AdamRule{});
    EXPECT_EQ(std::memcmp(&got, &wanted, offsetof(AdamConstants, decoupled)), 0) << p;
  }
  EXPECT_EQ(step.uniform.values()[0], 1);
  EXPECT_EQ(step.uniform.values()[1], 0);
}

/// There are two units of one group each, with 3 and 600 parameters. The device gets the ranks' notes about these
/// units, and the sums of the norm.
struct UnitsInBackward {
  static constexpr unsigned kFirst = 3, kSecond = 600, kBits = 64, kSums = 700;
  QueuedStep step{{{0, kFirst}, {kFirst, kSecond}}};
  Shared<float> used{std::vector<float>(kFirst + kSecond, 2.0f)}, differ{std::vector<float>(2 * kBits)};
  Shared<double> sums{std::vector<double>(2 * kSums, 1.0)};
  Shared<float> weight{{1.0f}};

  UnitsInBackward() { step.tables.updates_in_backward = true; }
  void begin(const StepRequest& request, unsigned unit) {
    weight.set(0, static_cast<float>(request.microbatches));
    UnitRequest of;
    of.weight = weight.data();
    of.unit = static_cast<int>(unit);
    of.first_group = unit;
    of.groups = 1;
    of.first_parameter = unit * kFirst;
    of.parameters = unit == 0 ? kFirst : kSecond;
    of.sum_count = kSums;
    of.digest_bits = kBits;
    of.sums = sums.data() + unit * kSums;
    of.used = used.data() + of.first_parameter;
    of.differ = differ.data() + unit * kBits;
    check(cuda::begin_unit(request, of, step.tables, nullptr));
  }
};

TEST_F(DeviceKernels, UnitInBackwardSetsConstantsOfItsParametersAlone) {
  const RuleOptimizer optimizer(adamw());
  const StepRequest request = request_of(optimizer, 3e-4, 3);
  UnitsInBackward units;
  units.used.set(1, 0.0f);
  units.used.set(UnitsInBackward::kFirst + UnitsInBackward::kSecond - 1, 0.0f);
  const std::size_t all = UnitsInBackward::kFirst + UnitsInBackward::kSecond;
  for (int round = 1; round <= 2; ++round) {
    units.begin(request, 1);
    EXPECT_EQ(units.step.steps.values()[0], round - 1) << "the other unit's time has not come";
    EXPECT_EQ(units.step.decision.values()[0].gradient_scale, static_cast<float>(1.0 / 3));
    units.begin(request, 0);
    units.step.decide(request);
    EXPECT_EQ(units.step.decision.values()[0].so_far.applied, round);
    EXPECT_EQ(units.step.decision.values()[0].is_skipped, 0);
    for (std::size_t p = 0; p < all; ++p) {
      const bool is_used = p != 1 && p != all - 1;
      EXPECT_EQ(units.step.used.values()[p], is_used ? 1 : 0) << p;
      EXPECT_EQ(units.step.steps.values()[p], is_used ? round : 0) << p;
      const AdamConstants wanted = is_used ? AdamRule::constants(optimizer.numbers(), round, 3e-4f) : AdamConstants{};
      const AdamConstants got = constants_for(units.step.constants.values()[p], AdamRule{});
      EXPECT_EQ(std::memcmp(&got, &wanted, offsetof(AdamConstants, decoupled)), 0) << p;
    }
    EXPECT_EQ(units.step.uniform.values()[0], 0);
    EXPECT_EQ(units.step.uniform.values()[1], 0);
  }
}

TEST_F(DeviceKernels, NonFiniteOrDifferingUnitStopsAllLaterUpdates) {
  const RuleOptimizer optimizer(adamw());
  const StepRequest request = request_of(optimizer, 3e-4);
  for (const double sum : {static_cast<double>(NAN), HUGE_VAL, 1.0}) {
    UnitsInBackward units;
    if (std::isfinite(sum)) units.differ.set(2 * UnitsInBackward::kBits - 1, -1.0f);
    units.sums.set(2 * UnitsInBackward::kSums - 1, sum);
    units.begin(request, 1);
    units.begin(request, 0);  // unit 0 has no bad gradient
    units.step.sum.set(0, sum);
    for (int round = 0; round < 2; ++round) {  // a later good step does not undo the skip
      units.step.decide(request);
      const StepDecision decision = units.step.decision.values()[0];
      EXPECT_EQ(decision.is_skipped, 1) << sum;
      EXPECT_EQ(decision.is_overflow, std::isfinite(sum) ? 0 : 1);
      EXPECT_EQ(decision.not_finite_unit, std::isfinite(sum) ? 0 : 2);
      EXPECT_EQ(decision.so_far.applied, 0);
      units.step.sum.set(0, 1.0);
      units.begin(request, 0);
    }
    EXPECT_TRUE(std::ranges::all_of(units.step.steps.values(), [](std::int64_t count) { return count == 0; })) << sum;
  }
}

TEST_F(DeviceKernels, ParameterGroupsHaveNumbersAndRatesOfTheirOwn) {
  OptimizerConfig other = adamw();
  other.beta1 = 0.8;
  other.weight_decay = 0.3;
  const RuleOptimizer optimizer(adamw()), others(other);
  const Shared<GroupNumbers> numbers(
      std::vector<GroupNumbers>{{others.numbers(), 0.5, NAN}, {optimizer.numbers(), 1.0, 0.25}});
  const Shared<std::uint32_t> number(std::vector<std::uint32_t>{0, 1, 1, 2, 1, 1});
  QueuedStep step({{0, 4}, {4, 2}});
  step.tables.group_numbers = numbers.data();
  step.tables.group_number = number.data();
  step.decide(request_of(optimizer, 3e-4));
  for (std::size_t p = 0; p < step.count; ++p) {
    const RuleNumbers& own = number.values()[p] == 1 ? others.numbers() : optimizer.numbers();
    const float lr = p == 0 ? 3e-4f : p == 3 ? 0.25f : static_cast<float>(3e-4 * 0.5);
    const AdamConstants wanted = AdamRule::constants(own, 1, lr),
                        got = constants_for(step.constants.values()[p], AdamRule{});
    EXPECT_EQ(std::memcmp(&got, &wanted, offsetof(AdamConstants, decoupled)), 0) << p;
  }
  EXPECT_EQ(step.uniform.values()[0], 0);
  EXPECT_EQ(step.uniform.values()[1], 1);
}

TEST_F(DeviceKernels, LossScaleMovesAsOnTheCpu) {
  const LossScaleConfig config{.initial = 1024.0, .growth_interval = 2, .hysteresis = 2, .minimum = 300.0};
  LossScalerState cpu = first_loss_scale(config);
  QueuedStep step({{0, 1}}, cpu.scale);
  StepRequest request = request_of(RuleOptimizer(adamw()), 0.01);
  request.loss_scale = loss_scale_rule(config);
  for (const char outcome : std::string("..xx..xxxx....x.xx..")) {
    step.sum.set(0, outcome == 'x' ? HUGE_VAL : 1.0);
    // The host knows of all skips so far, so the step takes the first of the ratios.
    request.known_skipped = step.decision.values()[0].so_far.skipped;
    step.decide(request);
    EXPECT_EQ(step.decision.values()[0].loss_scale, cpu.scale);
    next_loss_scale(request.loss_scale, cpu, outcome == 'x');
    EXPECT_EQ(step.decision.values()[0].scaler.scale, cpu.scale);
    EXPECT_EQ(step.decision.values()[0].scaler.finite_steps, cpu.finite_steps);
  }
}

// The kernel and the host make the same decisions, step after step: finite steps, overflows, spikes and a loss that has
// risen for good.
TEST_F(DeviceKernels, DecidesAsTheHost) {
  StepRequest request = request_of(RuleOptimizer(adamw()), 0.01, /*microbatches=*/4, /*max_norm=*/0.5);
  request.loss_scale = loss_scale_rule({.initial = 1024.0, .growth_interval = 3});
  request.spikes = {.factor = 2.0, .window = 3};
  request.noise_smoothing = 0.5;
  request.batch_scale.base = 32;
  request.warm_up.samples = 200;
  request.replicas = 2;
  std::vector<double> losses(3);
  const Shared<double> losses_there(losses);
  QueuedStep step({{0, 1}}, 1024.0f);
  step.tables.losses = losses_there.data();
  StepDecision host = first_decision(1024.0f);
  constexpr double kLosses[] = {4, 3, 3.5, 3, 9, 3, NAN, 9, 9, 9, 8}, kSums[] = {2e6, 5e7, HUGE_VAL, 3e5};
  int spikes = 0, overflows = 0;
  for (std::size_t i = 0; i < 2 * std::size(kLosses); ++i) {
    const AgreedSums sums{kLosses[i % std::size(kLosses)], request.microbatches, 100, 16 + static_cast<int>(i)};
    const double square = kSums[i % std::size(kSums)];
    StepDecision there = step.decision.values()[0];
    for (StepDecision* of : {&there, &host}) {
      static_cast<AgreedSums&>(*of) = sums;
      of->own = {3 * square, 4.0, 4.0};
    }
    step.decision.set(0, there);
    step.sum.set(0, square);
    request.known_skipped = there.so_far.skipped;
    request.lr_ratios[0] = 1.0 / static_cast<double>(1 + there.so_far.applied);
    step.decide(request);
    there = step.decision.values()[0];
    std::vector<double> sorted = losses;
    std::ranges::sort(sorted);
    const double median = host.spikes.count == 3 ? sorted[1] : 0.0;
    decide(request, {square, /*is_finite=*/true, host.scaler.scale, request.lr_ratios[0], median}, losses.data(), host);
    const auto numbers_of = [](const StepDecision& d) {
      return std::vector<double>{d.grad_norm,    d.lr,           d.gradient_scale, d.loss_scale,
                                 d.scaler.scale, d.noise.square, d.noise.variance, d.noise.weight,
                                 d.noise.batch,  d.spikes.median};
    };
    const auto counts_of = [](const StepDecision& d) {
      return std::vector<std::int64_t>{d.is_overflow,
                                       d.is_skipped,
                                       static_cast<std::int64_t>(d.spike),
                                       d.so_far.applied,
                                       d.so_far.skipped,
                                       d.so_far.samples,
                                       d.scaler.finite_steps,
                                       d.scaler.overflow_steps,
                                       d.spikes.count,
                                       d.spikes.next,
                                       d.spikes.in_a_row};
    };
    EXPECT_EQ(numbers_of(there), numbers_of(host)) << "step " << i;
    EXPECT_EQ(counts_of(there), counts_of(host)) << "step " << i;
    EXPECT_TRUE(there.loss == host.loss || (std::isnan(there.loss) && std::isnan(host.loss))) << "step " << i;
    EXPECT_EQ(losses_there.values(), losses) << "step " << i;
    spikes += host.spike == SpikeVerdict::kSpike ? 1 : 0;
    overflows += host.is_overflow;
  }
  EXPECT_GT(spikes, 0);
  EXPECT_GT(overflows, 0);
}

TEST_F(DeviceKernels, LearningRateFollowsTheAppliedSteps) {
  QueuedStep step;
  StepRequest request = request_of(RuleOptimizer(adamw()), 0.5);
  for (int k = 0; k <= kMostStepsInFlight; ++k) request.lr_ratios[k] = 1.0 / (1 + k);
  int skipped = 0;
  for (const bool overflow : {false, true, true, false}) {
    step.sum.set(0, overflow ? HUGE_VAL : 1.0);
    step.decide(request);  // the host's known_skipped stays 0
    EXPECT_EQ(step.decision.values()[0].lr, 0.5 / (1 + skipped));
    skipped += overflow ? 1 : 0;
  }
  request.batch_scale.base = 32;
  step.decision.data()->samples = 96;
  step.decide(request);
  EXPECT_EQ(step.decision.values()[0].lr, 0.5 * 3.0 * (1.0 / 3));
  request.batch_scale.by_root = true;
  step.decision.data()->samples = 288;
  step.decide(request);
  EXPECT_EQ(step.decision.values()[0].lr, 0.5 * 3.0 * (1.0 / 3));
}

TEST_F(DeviceKernels, RateRisesOverTheSamplesOfAppliedStepsAndAllReplicas) {
  QueuedStep step;
  StepRequest request = request_of(RuleOptimizer(adamw()), 0.5);
  request.warm_up.samples = 96;
  request.replicas = 2;
  step.decision.data()->samples = 16;
  std::int64_t seen = 0;
  for (const bool overflow : {false, true, false, false, false}) {
    step.sum.set(0, overflow ? HUGE_VAL : 1.0);
    request.known_skipped = step.decision.values()[0].so_far.skipped;
    step.decide(request);
    EXPECT_EQ(step.decision.values()[0].lr, seen >= 96 ? 0.5 : 0.5 * (static_cast<double>(seen + 32) / 128));
    seen += overflow ? 0 : 32;
    EXPECT_EQ(step.decision.values()[0].so_far.samples, seen);
  }
}

TEST_F(DeviceKernels, ParametersOfOneRunMayDifferInTheirStepCounts) {
  // There are four parameters. The second parameter begins inside a warp's block, and only its average changes. The
  // third parameter is a step behind. The fourth parameter was never used.
  const std::pair<WeightFormat, StateDType> formats[] = {{WeightFormat::kF32, StateDType::kF32},
                                                         {WeightFormat::kSplitBF16, StateDType::kBF16},
                                                         {WeightFormat::kF32AndBF16, StateDType::k8Bit}};
  for (const bool is_first_of_run : {false, true})
    for (const auto& [weights, states] : formats) {
      const bool blocks = states == StateDType::k8Bit;
      const std::size_t second = blocks ? 512 : 352, third = blocks ? 1024 : 800, fourth = 2048, end = 3000;
      const RuleOptimizer cpu(adamw(states), {.decay = 0.9});
      StepProblem problem = finite_problem(end, {weights, cpu}), got = problem;
      const DeviceProblem device(problem);
      QueuedStep step({{0, 4}});
      std::vector<ParameterBegin> begins;
      for (const std::size_t begin : {std::size_t{0}, second, third, fourth}) {
        begins.push_back(
            {static_cast<std::uint32_t>(begin / kParameterAlign), static_cast<std::uint32_t>(begins.size())});
      }
      const Shared<ParameterBegin> device_begins(begins);
      step.steps.set(0, 1);
      step.steps.set(1, 5);
      step.used.set(1, 0);
      step.used.set(3, 0);
      step.decision.data()->so_far.applied = is_first_of_run ? 0 : 7;
      DeviceRun run = device.run(cpu, problem, 0, end);
      run.parameters = 4;
      run.begins = device_begins.data();
      step.decide(request_of(cpu, 0.01));
      check(cuda::update_step(run, step.tables, nullptr));
      cpu.step({.gradient_scale = 1.0f, .lr = 0.01f, .step = 2}, problem.slice(0, second));
      cpu.average(problem.slice(second, third));
      cpu.step({.gradient_scale = 1.0f, .lr = 0.01f, .step = 1, .is_first_of_run = is_first_of_run},
               problem.slice(third, fourth));
      device.read_back(got);
      EXPECT_TRUE(same_bits(got, problem)) << static_cast<int>(states);
      check(cuda::swap_averages(run, step.tables, nullptr));
      cpu.swap_average(problem.slice(0, fourth));
      device.read_back(got);
      EXPECT_TRUE(same_bits(got, problem)) << static_cast<int>(states);
    }
}

TEST_F(DeviceKernels, MessagesAreCombinedInRankOrder) {
  // There are two groups, of 2 parameters and of 1, and three ranks.
  constexpr std::size_t kSumsOffset = sizeof(StepMessageHeader) + 8, kBytes = kSumsOffset + 3 * sizeof(double);
  std::vector<std::byte> messages(3 * kBytes);
  for (int rank = 0; rank < 3; ++rank) {
    std::byte* const message = messages.data() + kBytes * static_cast<std::size_t>(rank);
    const StepMessageHeader header{
        .loss = 0.1 * (rank + 1), .weight = 0.5 * rank, .tokens = rank, .samples = 2 * rank, .gathers = 5};
    std::memcpy(message, &header, sizeof header);
    message[sizeof header + static_cast<std::size_t>(rank % 2)] = std::byte{1};
  }
  QueuedStep step({{0, 2}, {2, 1}});
  Shared<std::byte> device_messages(messages);
  step.tables.ranks = 3;
  step.tables.shard_size = 3;
  step.tables.messages = {device_messages.data(), kBytes, kSumsOffset};
  check(cuda::read_messages(step.tables, nullptr));
  const StepDecision decision = step.decision.values()[0];
  EXPECT_EQ(decision.loss, 0.1 / 3 + 0.2 / 3 + 0.1 * 3 / 3);
  EXPECT_EQ(decision.weight, 1.5);
  EXPECT_EQ(decision.tokens, 3);
  EXPECT_EQ(decision.samples, 6);
  EXPECT_EQ(decision.gathers_differ, 0);
  EXPECT_EQ(step.used.values(), (std::vector<std::uint8_t>{1, 1, 0}));

  reinterpret_cast<StepMessageHeader*>(device_messages.data() + kBytes)->gathers = 6;
  check(cuda::read_messages(step.tables, nullptr));
  EXPECT_EQ(step.decision.values()[0].gathers_differ, 1);
  step.decide(request_of(RuleOptimizer(adamw()), 0.01));
  EXPECT_EQ(step.decision.values()[0].is_skipped, 1);
  EXPECT_EQ(step.decision.values()[0].is_overflow, 0);

  reinterpret_cast<StepMessageHeader*>(device_messages.data() + kBytes)->gathers = 5;
  EXPECT_EQ(step.decision.values()[0].numbers_differ, 0);
  reinterpret_cast<StepMessageHeader*>(device_messages.data() + 2 * kBytes)->numbers = 7;
  check(cuda::read_messages(step.tables, nullptr));
  EXPECT_EQ(step.decision.values()[0].numbers_differ, 2) << "rates or options";
  step.decide(request_of(RuleOptimizer(adamw()), 0.01));
  EXPECT_EQ(step.decision.values()[0].is_skipped, 1);
}

MicrobatchLoss sum_in_tree(std::span<const MicrobatchLoss> all) {
  if (all.size() == 1) return all[0];
  const std::size_t middle = std::bit_floor(all.size() - 1);
  const MicrobatchLoss left = sum_in_tree(all.first(middle)), right = sum_in_tree(all.subspan(middle));
  return {left.loss + right.loss, left.weight + right.weight};
}

TEST_F(DeviceKernels, LossesOfMicrobatchesAreAddedInTheirTree) {
  const std::pair<int, int> cases[] = {{1, 1}, {1, 6}, {2, 4}, {3, 1}, {3, 4}, {4, 3}, {5, 7}};
  for (const auto& [ranks, rounds] : cases) {
    constexpr std::size_t kOffset = sizeof(StepMessageHeader) + 8;
    const auto each = static_cast<std::size_t>(rounds), bytes = kOffset + each * sizeof(MicrobatchLoss);
    std::vector<MicrobatchLoss> losses;
    for (int i = 0; i < ranks * rounds; ++i) losses.push_back({0.1 * (i * i + 1), 1.0 + 0.3 * (i % 3)});
    std::vector<std::byte> messages(static_cast<std::size_t>(ranks) * bytes);
    for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks); ++rank)
      std::memcpy(messages.data() + rank * bytes + kOffset, losses.data() + rank * each, each * sizeof(MicrobatchLoss));
    QueuedStep step;
    const Shared<std::byte> device_messages(messages);
    step.tables.ranks = step.tables.shard_size = ranks;
    step.tables.rounds = rounds;
    step.tables.messages = {.of_all = device_messages.data(), .bytes = bytes, .losses_offset = kOffset};
    check(cuda::read_messages(step.tables, nullptr));
    const MicrobatchLoss wanted = sum_in_tree(losses);
    EXPECT_EQ(step.decision.values()[0].loss, wanted.loss / (ranks * rounds)) << ranks << " ranks, " << rounds;
    EXPECT_EQ(step.decision.values()[0].weight, wanted.weight) << ranks << " ranks, " << rounds;
  }
}

}  // namespace device_kernels_test
}  // namespace tessera
