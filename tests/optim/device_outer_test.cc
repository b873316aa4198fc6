// Compares outer steps ("sync") by CUDA kernels with outer steps by the CPU's loops. The bits are the same.

#include "optim/cuda/device_outer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "optim/master_assigner.h"
#include "optim/outer_pass.h"
#include "tests/optim/device_problem.h"

namespace tessera {
namespace device_outer_test {

using DeviceOuter = DeviceKernels;

constexpr OuterWork kWorks[] = {OuterWork::kTake, OuterWork::kGradients, OuterWork::kMean,
                                OuterWork::kStep, OuterWork::kMix,       OuterWork::kScale};

/// Returns numbers of many magnitudes. All results are finite, since NaNs have different bits on a GPU.
std::vector<float> numbers(std::size_t numel, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-40, 6);
  std::vector<float> values(numel);
  for (float& x : values) x = std::ldexp(normal(random), exponent(random));
  const float specials[] = {0.0f, -0.0f, 1e-40f, -1e-45f, 3e37f};
  for (std::size_t i = 0; i < numel; i += 7) values[i] = specials[(i / 7) % std::size(specials)];
  return values;
}

/// The memory that one pass reads and writes.
struct PassMemory {
  std::vector<float> values, own, weights, momentum;

  explicit PassMemory(std::size_t numel)
      : values(numbers(numel, 1)), own(numbers(numel, 2)), weights(numbers(numel, 3)), momentum(numbers(numel, 4)) {}
};

/// A part is empty, has fewer or more elements than a warp has threads, or fills many thread blocks. The memory behind
/// a part does not change.
TEST_F(DeviceOuter, EveryPassHasTheCpusBits) {
  const OuterRule rule{.lr = 0.7f, .momentum = 0.9f, .mix = 0.3f, .replicas = 3};
  for (const OuterWork work : kWorks) {
    for (const std::size_t numel : {0, 5, 300, 20011}) {
      for (const float factor : {0.0f, 1.5f}) {
        SCOPED_TRACE("work " + std::to_string(static_cast<int>(work)) + ", " + std::to_string(numel) + " elements");
        PassMemory wanted(numel + 3);
        const Shared<float> values(wanted.values), own(wanted.own), weights(wanted.weights), momentum(wanted.momentum);
        OuterRun run{work, numel, values.data(), own.data(), weights.data(), momentum.data(), rule, factor};
        check(cuda::outer_pass(run, nullptr));
        run.values = wanted.values.data();
        run.own = wanted.own.data();
        run.weights = wanted.weights.data();
        run.momentum = wanted.momentum.data();
        outer_pass(run);
        EXPECT_TRUE(same_bits(values.values(), wanted.values));
        EXPECT_TRUE(same_bits(own.values(), wanted.own));
        EXPECT_TRUE(same_bits(weights.values(), wanted.weights));
        EXPECT_TRUE(same_bits(momentum.values(), wanted.momentum));
      }
    }
  }
}

/// The device writes masters in the place of weights, and reads masters back. A rule on the CPU gives the same bits.
TEST_F(DeviceOuter, MastersArePutInThePlaceOfWeightsAsByTheCpu) {
  constexpr std::size_t kNumel = 20011;
  for (const WeightFormat weights : kWeights) {
    SCOPED_TRACE("weights " + std::to_string(static_cast<int>(weights)));
    const MasterAssigner cpu(adamw(), {});
    const RuleOptimizer like(sgd_without_states(adamw()), {});
    StepProblem problem = finite_problem(kNumel, {weights, cpu}), got = problem;
    problem.gradient = numbers(kNumel, 5);
    const DeviceProblem device(problem);
    const DeviceRun run = device.run(like, problem, 0, kNumel);
    check(cuda::write_weights(run.arguments, device.gradient.data(), nullptr));
    cpu.step({.step = 1}, problem.slice(0, kNumel));
    device.read_back(got);
    EXPECT_TRUE(same_bits(got, problem));
    const Shared<float> read(std::vector<float>(kNumel, -7.0f));
    check(cuda::read_weights(run, read.data(), nullptr));
    EXPECT_TRUE(same_bits(read.values(), problem.masters()));
  }
}

TEST_F(DeviceOuter, WhereOthersHaveTheMastersTheParameterAloneIsWritten) {
  constexpr std::size_t kNumel = 1500;
  for (const WeightFormat weights : {WeightFormat::kF32AndBF16, WeightFormat::kF32AndF16, WeightFormat::kSplitBF16}) {
    SCOPED_TRACE("weights " + std::to_string(static_cast<int>(weights)));
    const MasterAssigner cpu(adamw(), {});
    const RuleOptimizer like(sgd_without_states(adamw()), {});
    StepProblem problem = finite_problem(kNumel, {weights, cpu}), got = problem;
    problem.gradient = numbers(kNumel, 5);
    const StepProblem before = problem;
    const DeviceProblem device(problem);
    StepArguments to = device.run(like, problem, 0, kNumel).arguments;
    to.master = nullptr;
    to.low = nullptr;
    check(cuda::write_weights(to, device.gradient.data(), nullptr));
    cpu.step({.step = 1}, problem.slice(0, kNumel));
    device.read_back(got);
    EXPECT_EQ(got.half, problem.half);
    EXPECT_EQ(got.low, before.low);
    EXPECT_EQ(got.master, before.master);
  }
}

}  // namespace device_outer_test
}  // namespace tessera
