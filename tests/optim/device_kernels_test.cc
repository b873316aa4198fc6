// The CUDA kernels beside the CPU's loops: the same bits. Built twice: with the kernels' source run on the host thread by
// thread (cuda_on_host.h), for machines without a GPU; and with the kernels themselves, label gpu.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "optim/adamw.h"
#include "optim/grad_norm.h"
#include "tests/optim/step_problem.h"

#if defined(TESSERA_CUDA_ON_HOST)
#include "tests/optim/cuda_on_host.h"
// Behind it: the kernels' source.
#include "optim/cuda/device_norm.cu"
#include "optim/cuda/device_step.cu"
#else
#include "optim/cuda/device_norm.h"
#include "optim/cuda/device_step.h"
#endif

namespace tessera {
namespace {

void check(cudaError_t error) { ASSERT_EQ(error, cudaSuccess); }

/// Values in memory that both sides reach.
template <class T>
class Shared {
 public:
  explicit Shared(const std::vector<T>& values) : numel_(values.size()) {
    const std::size_t bytes = std::max<std::size_t>(1, numel_ * sizeof(T));
#if defined(TESSERA_CUDA_ON_HOST)
    data_ = static_cast<T*>(std::aligned_alloc(128, (bytes + 127) / 128 * 128));
#else
    check(cudaMallocManaged(reinterpret_cast<void**>(&data_), bytes));
#endif
    if (numel_ > 0) std::memcpy(static_cast<void*>(data_), values.data(), numel_ * sizeof(T));
  }
  Shared(Shared&& other) noexcept : numel_(other.numel_), data_(std::exchange(other.data_, nullptr)) {}
  ~Shared() {
#if defined(TESSERA_CUDA_ON_HOST)
    std::free(data_);
#else
    cudaFree(data_);
#endif
  }
  T* data() const { return data_; }
  std::vector<T> values() const {
#if !defined(TESSERA_CUDA_ON_HOST)
    check(cudaDeviceSynchronize());
#endif
    return std::vector<T>(data_, data_ + numel_);
  }

 private:
  std::size_t numel_;
  T* data_ = nullptr;
};

class DeviceKernels : public testing::Test {
 protected:
  void SetUp() override {
#if !defined(TESSERA_CUDA_ON_HOST)
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
#endif
  }
};

constexpr WeightFormat kWeights[] = {WeightFormat::kF32, WeightFormat::kF32AndF32, WeightFormat::kF32AndBF16,
                                     WeightFormat::kF32AndF16, WeightFormat::kSplitBF16};
constexpr StateDType kStates[] = {StateDType::kF32, StateDType::kBF16, StateDType::k8Bit};
constexpr AdamHyperparameters kAdam = {0.9, 0.95, 1e-8, 0.1, true};

OptimizerConfig config_of(const AdamHyperparameters& h, StateDType states) {
  return {.type = h.decoupled ? OptimizerType::kAdamW : OptimizerType::kAdam, .beta1 = h.beta1, .beta2 = h.beta2,
          .eps = h.eps, .weight_decay = h.weight_decay, .state_dtype = states};
}

/// A problem's values in device memory, and back.
struct DeviceProblem {
  explicit DeviceProblem(const StepProblem& p)
      : gradient(p.gradient), master(p.master), copy(p.copy), half(p.half), low(p.low), state0(p.state[0]),
        state1(p.state[1]), scales0(p.scales[0]), scales1(p.scales[1]) {}

  void read_back(StepProblem& p) const {
    p.master = master.values();
    p.copy = copy.values();
    p.half = half.values();
    p.low = low.values();
    p.state = {state0.values(), state1.values()};
    p.scales = {scales0.values(), scales1.values()};
  }

  cuda::DeviceRun run(const Formats& formats, std::size_t begin, std::size_t end) const {
    const auto element = static_cast<std::size_t>(state_bytes(formats.states, 1).data);
    const bool split = formats.weights == WeightFormat::kSplitBF16;
    cuda::DeviceRun run;
    StepArguments& a = run.arguments;
    a.numel = end - begin;
    a.gradient = gradient.data() + begin;
    a.master = split ? nullptr : master.data() + begin;
    a.low = split ? low.data() + begin : nullptr;
    if (formats.weights == WeightFormat::kF32AndF32) a.parameter = copy.data() + begin;
    if (split || formats.weights == WeightFormat::kF32AndBF16 || formats.weights == WeightFormat::kF32AndF16)
      a.parameter = half.data() + begin;
    a.state0 = {state0.data() + begin * element, scales0.data() + begin / kStateBlock};
    a.state1 = {state1.data() + begin * element, scales1.data() + begin / kStateBlock};
    a.weights = formats.weights;
    a.states = formats.states;
    a.first_element = static_cast<std::uint32_t>(begin);
    run.stream = 5;
    return run;
  }

  Shared<float> gradient, master, copy;
  Shared<std::uint16_t> half;
  Shared<std::int16_t> low;
  Shared<std::byte> state0, state1;
  Shared<float> scales0, scales1;
};

/// The decision of a step over one parameter, and what it is made from.
struct DeviceStep {
  Shared<double> sum{{1.0}};
  Shared<std::uint8_t> used{{1}};
  Shared<std::int64_t> steps{{0}};
  Shared<AdamConstants> constants{std::vector<AdamConstants>(1)};
  Shared<cuda::DeviceDecision> decision{std::vector<cuda::DeviceDecision>(1)};

  void decide(const cuda::StepRequest& request) {
    check(cuda::decide_step(request, sum.data(), used.data(), steps.data(), constants.data(), 1, decision.data(),
                            nullptr));
  }
};

void expect_the_cpus_bits(Formats formats, const AdamHyperparameters& adam, std::size_t begin, std::size_t end) {
  SCOPED_TRACE("weights " + std::to_string(static_cast<int>(formats.weights)) + ", states " +
               std::to_string(static_cast<int>(formats.states)) + ", elements " + std::to_string(begin) + " to " +
               std::to_string(end));
  StepProblem problem(end, 7, /*with_specials=*/true, formats), got = problem;
  const AdamW cpu(config_of(adam, formats.states));
  const DeviceProblem device(problem);
  DeviceStep step;
  for (std::int64_t t = 1; t <= 3; ++t) {
    const cuda::StepRequest request{.adam = adam, .lr = 0.01f, .mean = 0.25};
    cpu.step({.gradient_scale = 0.25f, .lr = 0.01f, .step = t}, problem.slice(begin, end, 2));
    step.decide(request);
    check(cuda::adam_step(device.run(formats, begin, end), step.decision.data(), step.steps.data(),
                          step.constants.data(), nullptr));
  }
  device.read_back(got);
  EXPECT_TRUE(same_bits(got, problem));
  EXPECT_EQ(step.decision.values()[0].applied, 3);
}

TEST_F(DeviceKernels, AdamGivesTheCpusBitsInEveryFormat) {
  for (WeightFormat weights : kWeights)
    for (StateDType states : kStates)
      for (std::size_t numel : {1u, 7u, 8u, 255u, 256u, 2051u}) expect_the_cpus_bits({weights, states}, kAdam, 0, numel);
}

TEST_F(DeviceKernels, RunsBeginWhereParametersDo) {
  AdamHyperparameters adam = kAdam;
  adam.decoupled = false;
  expect_the_cpus_bits({WeightFormat::kF32, StateDType::kF32}, adam, 32, 1000);
  expect_the_cpus_bits({WeightFormat::kSplitBF16, StateDType::kBF16}, adam, 96, 5000);
  expect_the_cpus_bits({WeightFormat::kF32AndBF16, StateDType::k8Bit}, adam, 512, 1111);
}

TEST_F(DeviceKernels, ARunThatIsNotAlignedIsRefused) {
  const StepProblem problem(100, 7, false);
  const DeviceProblem device(problem);
  DeviceStep step;
  EXPECT_EQ(cuda::adam_step(device.run({}, 1, 100), step.decision.data(), step.steps.data(), step.constants.data(),
                            nullptr),
            cudaErrorMisalignedAddress);
}

TEST_F(DeviceKernels, ANonFiniteNormSkipsTheStepAndCountsIt) {
  const StepProblem problem(300, 7, false);
  const DeviceProblem device(problem);
  DeviceStep step;
  for (double sum : {1.0, static_cast<double>(NAN), HUGE_VAL, 1.0}) {
    step.sum.data()[0] = sum;
    step.decide({.adam = kAdam, .lr = 0.01f});
    const cuda::DeviceDecision decision = step.decision.values()[0];
    EXPECT_EQ(decision.is_skipped, std::isfinite(sum) ? 0 : 1);
    if (std::isfinite(sum)) continue;
    const std::vector<float> before = device.master.values();
    check(cuda::adam_step(device.run({}, 0, 300), step.decision.data(), step.steps.data(), step.constants.data(),
                          nullptr));
    EXPECT_TRUE(same_bits(device.master.values(), before));
  }
  EXPECT_EQ(step.decision.values()[0].applied, 2);
  EXPECT_EQ(step.decision.values()[0].skipped, 2);
  EXPECT_EQ(step.steps.values()[0], 2);
}

TEST_F(DeviceKernels, TheDecisionClipsAndFoldsConstantsAsTheCpuDoes) {
  constexpr int kParameters = 700;  // more than a thread block has threads
  std::vector<std::uint8_t> used(kParameters, 1);
  used[3] = 0;
  std::vector<std::int64_t> steps(kParameters);
  for (int p = 0; p < kParameters; ++p) steps[p] = p;
  const Shared<std::uint8_t> device_used(used);
  const Shared<std::int64_t> device_steps(steps);
  const Shared<AdamConstants> constants{std::vector<AdamConstants>(kParameters)};
  const Shared<double> sum({1e6});
  const Shared<cuda::DeviceDecision> decision{std::vector<cuda::DeviceDecision>(1)};
  const double mean = 1.0 / (3 * 1024.0);
  check(cuda::decide_step({kAdam, 3e-4f, mean, 0.125}, sum.data(), device_used.data(), device_steps.data(),
                          constants.data(), kParameters, decision.data(), nullptr));
  const double norm = std::sqrt(1e6) * mean;
  const auto scale = static_cast<float>(mean * (0.125 / (norm + 1e-6)));
  EXPECT_EQ(decision.values()[0].grad_norm, norm);
  EXPECT_EQ(decision.values()[0].gradient_scale, scale);
  for (int p = 0; p < kParameters; ++p) {
    EXPECT_EQ(device_steps.values()[p], p == 3 ? 3 : p + 1);
    const AdamConstants wanted = p == 3 ? AdamConstants{} : adam_constants(kAdam, p + 1, 3e-4f, scale);
    const AdamConstants got = constants.values()[p];
    EXPECT_EQ(std::memcmp(&got, &wanted, offsetof(AdamConstants, decoupled)), 0) << p;
  }
}

std::vector<float> random_values(std::size_t numel, std::uint32_t seed) {
  return StepProblem(numel, seed, false).gradient;
}

/// The nodes of a shard, as the device makes them.
std::vector<NormNode> device_nodes(const NormTree& tree, std::span<const float> shard, std::uint64_t first_block) {
  const Shared<float> values(std::vector<float>(shard.begin(), shard.end()));
  const Shared<NormNode> nodes{std::vector<NormNode>(tree.max_nodes())};
  // What lies behind the scratch stays as it is.
  const std::size_t bytes = cuda::norm_scratch_bytes(shard.size());
  const Shared<std::byte> scratch{std::vector<std::byte>(bytes + 64, std::byte{0x5a})};
  check(cuda::norm_nodes(values.data(), shard.size(), first_block, nodes.data(), tree.max_nodes(), scratch.data(),
                         nullptr));
  const std::vector<std::byte> left = scratch.values();
  EXPECT_TRUE(std::all_of(left.begin() + static_cast<std::ptrdiff_t>(bytes), left.end(),
                          [](std::byte b) { return b == std::byte{0x5a}; }));
  return nodes.values();
}

bool same_nodes(std::vector<NormNode> got, std::vector<NormNode> wanted) {
  wanted.resize(got.size());  // the rest are absent
  return same_bits(got, wanted);
}

TEST_F(DeviceKernels, NormNodesAreTheCpusForEveryShard) {
  constexpr std::uint64_t kBlock = NormTree::kBlockNumel;
  struct Case {
    std::uint64_t first, end;  // blocks
  };
  // Without a whole tile of 256 blocks; with some, and with blocks before and behind them.
  for (const Case& c : {Case{0, 1}, Case{5, 9}, Case{3, 3 + 500}, Case{0, 256}, Case{255, 513}, Case{1, 1030}}) {
    const std::vector<float> shard = random_values((c.end - c.first) * kBlock, 3);
    const NormTree tree(c.end + 17);
    std::vector<NormNode> wanted;
    bool finite = true;
    tree.partial(shard, c.first, wanted, finite);
    EXPECT_TRUE(same_nodes(device_nodes(tree, shard, c.first), wanted)) << c.first << " to " << c.end;
  }
}

TEST_F(DeviceKernels, TheLastBlockMayBeShort) {
  for (std::size_t numel : {1u, 257u, 256u * 256u - 3u, 256u * 256u + 3u}) {
    const std::vector<float> shard = random_values(numel, 4);
    const NormTree tree(NormTree::blocks_of(numel));
    std::vector<NormNode> wanted;
    bool finite = true;
    tree.partial(shard, 0, wanted, finite);
    EXPECT_TRUE(same_nodes(device_nodes(tree, shard, 0), wanted)) << numel;
  }
}

TEST_F(DeviceKernels, CombinedNormIsTheCpus) {
  // Two groups; the first cut into three shards, the second whole.
  const std::vector<float> one = random_values(256 * 300, 5), other = random_values(256 * 7 + 9, 6);
  const NormTree trees[] = {NormTree(300), NormTree(8)};
  std::vector<NormNode> nodes;
  std::vector<std::uint32_t> first = {0};
  for (auto [begin, end] : {std::pair{0, 100}, {100, 101}, {101, 300}}) {
    const auto shard = std::span(one).subspan(256u * begin, 256u * (end - begin));
    const auto some = device_nodes(trees[0], shard, static_cast<std::uint64_t>(begin));
    nodes.insert(nodes.end(), some.begin(), some.end());
  }
  first.push_back(static_cast<std::uint32_t>(nodes.size()));
  const auto some = device_nodes(trees[1], other, 0);
  nodes.insert(nodes.end(), some.begin(), some.end());
  first.push_back(static_cast<std::uint32_t>(nodes.size()));

  const auto combined = [&](const std::vector<NormNode>& given) {
    const Shared<NormNode> device(given), scratch(given);
    const Shared<std::uint32_t> device_first(first);
    const Shared<std::uint64_t> blocks({300, 8});
    const Shared<double> sums({0, 0}), total({0});
    check(cuda::combine_norm(device.data(), device_first.data(), blocks.data(), 2, scratch.data(), sums.data(),
                             total.data(), nullptr));
    return total.values()[0];
  };
  double wanted = 0;
  for (int g : {0, 1}) wanted += *trees[g].combine(std::span(nodes).subspan(first[g], first[g + 1] - first[g]));
  EXPECT_EQ(combined(nodes), wanted);
  nodes[0] = NormNode{};  // a shard's node is missing
  EXPECT_TRUE(std::isnan(combined(nodes)));
}

}  // namespace
}  // namespace tessera
