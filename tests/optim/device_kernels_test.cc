// The CUDA kernels beside the CPU's loops: the same bits. Built twice: with the kernels' source run on the host thread by
// thread (cuda_on_host.h), for machines without a GPU; and with the kernels themselves, label gpu.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "optim/adamw.h"
#include "optim/grad_norm.h"
#include "optim/loss_scaler.h"
#include "optim/sgd.h"
#include "tests/optim/step_problem.h"

#if defined(TESSERA_CUDA_ON_HOST)
#include "tests/support/cuda_on_host.h"
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
  return {.type = h.decoupled ? OptimizerType::kAdamW : OptimizerType::kAdam,
          .beta1 = h.beta1,
          .beta2 = h.beta2,
          .eps = h.eps,
          .weight_decay = h.weight_decay,
          .state_dtype = states};
}

/// A problem without gradients that overflow: their step is skipped, so they never come to these kernels; and NaNs have
/// other bits on a GPU.
StepProblem finite_problem(std::size_t numel, Formats formats) {
  StepProblem problem(numel, 7, /*with_specials=*/true, formats);
  for (float& g : problem.gradient) {
    if (!(std::abs(g) < 1e15f)) g = std::signbit(g) ? -1e15f : 1e15f;
  }
  return problem;
}

/// A problem's values in device memory, and back.
struct DeviceProblem {
  explicit DeviceProblem(const StepProblem& p)
      : gradient(p.gradient),
        master(p.master),
        copy(p.copy),
        half(p.half),
        low(p.low),
        state0(p.state[0]),
        state1(p.state[1]),
        scales0(p.scales[0]),
        scales1(p.scales[1]) {}

  void read_back(StepProblem& p) const {
    p.master = master.values();
    p.copy = copy.values();
    p.half = half.values();
    p.low = low.values();
    p.state = {state0.values(), state1.values()};
    p.scales = {scales0.values(), scales1.values()};
  }

  DeviceRun run(const Formats& formats, std::size_t begin, std::size_t end) const {
    const auto element = static_cast<std::size_t>(state_bytes(formats.states, 1).data);
    const bool split = formats.weights == WeightFormat::kSplitBF16;
    DeviceRun run;
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
    run.stream = 5;
    run.first_element = begin;
    run.parameters = 1;
    run.begins = begins.data();
    return run;
  }

  Shared<ParameterBegin> begins{{{}}};
  Shared<float> gradient, master, copy;
  Shared<std::uint16_t> half;
  Shared<std::int16_t> low;
  Shared<std::byte> state0, state1;
  Shared<float> scales0, scales1;
};

StepRequest request_of(const AdamHyperparameters& adam, double lr, double microbatches = 1.0, double max_norm = 0.0) {
  StepRequest request;
  request.adam = adam;
  request.microbatches = microbatches;
  request.max_norm = max_norm;
  request.base_lr = lr;
  for (double& ratio : request.lr_ratios) ratio = 1.0;
  return request;
}

DeviceDecision first_decision(float scale = 1.0f) {
  DeviceDecision decision{};
  decision.scaler.scale = scale;
  return decision;
}

/// A step over the parameters of some groups, decided from a sum of squares.
struct DeviceStep {
  explicit DeviceStep(const std::vector<StepGroup>& groups = {{0, 1}}, float scale = 1.0f)
      : count(groups.back().first_parameter + groups.back().parameters),
        group(groups),
        decision({first_decision(scale)}) {
    tables.parameters = static_cast<int>(count);
    tables.groups = static_cast<int>(groups.size());
    tables.group = group.data();
    tables.sum_of_squares = sum.data();
    tables.used = used.data();
    tables.is_uniform = uniform.data();
    tables.constants = constants.data();
    tables.sgd = sgd.data();
    tables.steps = steps.data();
    tables.decision = decision.data();
  }
  void decide(const StepRequest& request) { check(cuda::decide_step(request, tables, nullptr)); }

  const std::size_t count;
  Shared<StepGroup> group;
  Shared<double> sum{{1.0}};
  Shared<std::uint8_t> used{std::vector<std::uint8_t>(count, 1)}, uniform{std::vector<std::uint8_t>(16)};
  Shared<std::int64_t> steps{std::vector<std::int64_t>(count)};
  Shared<AdamConstants> constants{std::vector<AdamConstants>(count)};
  Shared<SgdConstants> sgd{std::vector<SgdConstants>(1)};
  Shared<DeviceDecision> decision;
  StepTables tables;
};

void expect_the_cpus_bits(Formats formats, const AdamHyperparameters& adam, std::size_t begin, std::size_t end) {
  SCOPED_TRACE("weights " + std::to_string(static_cast<int>(formats.weights)) + ", states " +
               std::to_string(static_cast<int>(formats.states)) + ", elements " + std::to_string(begin) + " to " +
               std::to_string(end));
  StepProblem problem = finite_problem(end, formats), got = problem;
  const AdamW cpu(config_of(adam, formats.states));
  const DeviceProblem device(problem);
  DeviceStep step;
  for (std::int64_t t = 1; t <= 3; ++t) {
    cpu.step({.gradient_scale = 0.25f, .lr = 0.01f, .step = t}, problem.slice(begin, end, 2));
    step.decide(request_of(adam, 0.01, 4));
    check(cuda::update_step(device.run(formats, begin, end), step.tables, nullptr));
  }
  device.read_back(got);
  EXPECT_TRUE(same_bits(got, problem));
  EXPECT_EQ(step.decision.values()[0].applied, 3);
}

TEST_F(DeviceKernels, AdamGivesTheCpusBitsInEveryFormat) {
  for (WeightFormat weights : kWeights)
    for (StateDType states : kStates)
      for (std::size_t numel : {1u, 7u, 8u, 255u, 256u, 2051u})
        expect_the_cpus_bits({weights, states}, kAdam, 0, numel);
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
  EXPECT_EQ(cuda::update_step(device.run({}, 1, 100), step.tables, nullptr), cudaErrorMisalignedAddress);
  DeviceRun moved = device.run({}, 0, 100);
  moved.first_element = 8;
  EXPECT_EQ(cuda::update_step(moved, step.tables, nullptr), cudaErrorMisalignedAddress);
}

TEST_F(DeviceKernels, ANonFiniteNormSkipsTheStepAndCountsIt) {
  const StepProblem problem(300, 7, false);
  const DeviceProblem device(problem);
  DeviceStep step;
  for (double sum : {1.0, static_cast<double>(NAN), HUGE_VAL, 1.0}) {
    step.sum.data()[0] = sum;
    step.decide(request_of(kAdam, 0.01));
    const DeviceDecision decision = step.decision.values()[0];
    EXPECT_EQ(decision.is_skipped, std::isfinite(sum) ? 0 : 1);
    EXPECT_EQ(decision.is_overflow, decision.is_skipped);
    if (std::isfinite(sum)) continue;
    const std::vector<float> before = device.master.values();
    check(cuda::update_step(device.run({}, 0, 300), step.tables, nullptr));
    EXPECT_TRUE(same_bits(device.master.values(), before));
  }
  EXPECT_EQ(step.decision.values()[0].applied, 2);
  EXPECT_EQ(step.decision.values()[0].skipped, 2);
  EXPECT_EQ(step.steps.values()[0], 2);
}

TEST_F(DeviceKernels, TheDecisionClipsAndFoldsConstantsAsTheCpuDoes) {
  constexpr int kParameters = 700;  // more than a thread block has threads
  DeviceStep step({{0, 3}, {3, kParameters - 3}}, 1024.0f);
  step.used.data()[3] = 0;
  for (int p = 3; p < kParameters; ++p) step.steps.data()[p] = p;
  step.sum.data()[0] = 1e6;
  step.decide(request_of(kAdam, 3e-4, 3, 0.125));
  const double mean = 1.0 / (3 * 1024.0), norm = std::sqrt(1e6) * mean;
  const auto scale = static_cast<float>(mean * (0.125 / (norm + 1e-6)));
  const DeviceDecision decision = step.decision.values()[0];
  EXPECT_EQ(decision.grad_norm, norm);
  EXPECT_EQ(decision.gradient_scale, scale);
  EXPECT_EQ(decision.loss_scale, 1024.0f);
  EXPECT_EQ(decision.lr, 3e-4);
  for (int p = 0; p < kParameters; ++p) {
    const std::int64_t steps = p < 3 ? 1 : p == 3 ? 3 : p + 1;
    EXPECT_EQ(step.steps.values()[p], steps);
    const AdamConstants wanted = p == 3 ? AdamConstants{} : adam_constants(kAdam, steps, 3e-4f, scale);
    const AdamConstants got = step.constants.values()[p];
    EXPECT_EQ(std::memcmp(&got, &wanted, offsetof(AdamConstants, decoupled)), 0) << p;
  }
  EXPECT_EQ(step.uniform.values()[0], 1);
  EXPECT_EQ(step.uniform.values()[1], 0);
}

TEST_F(DeviceKernels, TheLossScaleMovesAsOnTheCpu) {
  const LossScaleConfig config{.initial = 1024.0, .growth_interval = 2, .hysteresis = 2, .minimum = 300.0};
  LossScaler cpu(config);
  DeviceStep step({{0, 1}}, cpu.scale());
  StepRequest request = request_of(kAdam, 0.01);
  request.loss_scale = cpu.rule();
  for (const char outcome : std::string("..xx..xxxx....x.xx..")) {
    step.sum.data()[0] = outcome == 'x' ? HUGE_VAL : 1.0;
    // The host knows of no skip yet: the ratio is that of all which were.
    request.known_skipped = step.decision.values()[0].skipped;
    step.decide(request);
    EXPECT_EQ(step.decision.values()[0].loss_scale, cpu.scale());
    cpu.update(outcome == 'x');
    EXPECT_EQ(step.decision.values()[0].scaler.scale, cpu.scale());
    EXPECT_EQ(step.decision.values()[0].scaler.finite_steps, cpu.state().finite_steps);
  }
}

TEST_F(DeviceKernels, TheLearningRateIsThatOfTheStepsApplied) {
  DeviceStep step;
  StepRequest request = request_of(kAdam, 0.5);
  for (int k = 0; k <= kMostStepsInFlight; ++k) request.lr_ratios[k] = 1.0 / (1 + k);
  int skipped = 0;
  for (const bool overflow : {false, true, true, false}) {
    step.sum.data()[0] = overflow ? HUGE_VAL : 1.0;
    step.decide(request);  // known_skipped stays 0
    EXPECT_EQ(step.decision.values()[0].lr, 0.5 / (1 + skipped));
    skipped += overflow ? 1 : 0;
  }
  request.base_batch_size = 32;
  step.decision.data()->samples = 96;
  step.decide(request);
  EXPECT_EQ(step.decision.values()[0].lr, 0.5 * 3.0 * (1.0 / 3));
}

TEST_F(DeviceKernels, ParametersOfOneRunMayHaveTakenPartInDifferentSteps) {
  // Three parameters; the second begins inside a warp's block, and is left alone; the third is a step behind.
  for (const Formats formats :
       {Formats{WeightFormat::kF32, StateDType::kF32}, Formats{WeightFormat::kSplitBF16, StateDType::kBF16},
        Formats{WeightFormat::kF32AndBF16, StateDType::k8Bit}}) {
    const bool blocks = formats.states == StateDType::k8Bit;
    const std::size_t second = blocks ? 512 : 352, third = blocks ? 1024 : 800, end = 3000;
    StepProblem problem = finite_problem(end, formats), got = problem;
    const DeviceProblem device(problem);
    const AdamW cpu(config_of(kAdam, formats.states));
    DeviceStep step({{0, 3}});
    const Shared<ParameterBegin> begins({{0, 0},
                                         {static_cast<std::uint32_t>(second / kParameterAlign), 1},
                                         {static_cast<std::uint32_t>(third / kParameterAlign), 2}});
    step.steps.data()[0] = 1;
    step.used.data()[1] = 0;
    DeviceRun run = device.run(formats, 0, end);
    run.parameters = 3;
    run.begins = begins.data();
    step.decide(request_of(kAdam, 0.01));
    check(cuda::update_step(run, step.tables, nullptr));
    cpu.step({.gradient_scale = 1.0f, .lr = 0.01f, .step = 2}, problem.slice(0, second, 2));
    cpu.step({.gradient_scale = 1.0f, .lr = 0.01f, .step = 1}, problem.slice(third, end, 2));
    device.read_back(got);
    EXPECT_TRUE(same_bits(got, problem)) << static_cast<int>(formats.states);
  }
}

TEST_F(DeviceKernels, SgdGivesTheCpusBitsInEveryFormat) {
  for (const WeightFormat weights : kWeights) {
    for (const StateDType states : {StateDType::kF32, StateDType::kBF16}) {
      for (const double momentum : {0.0, 0.9}) {
        const std::size_t end = 2051;
        const Formats formats{weights, states};
        StepProblem problem = finite_problem(end, formats), got = problem;
        const Sgd cpu({.type = OptimizerType::kSgd,
                       .weight_decay = 0.1,
                       .momentum = momentum,
                       .dampening = 0.25,
                       .state_dtype = states});
        const DeviceProblem device(problem);
        DeviceStep step;
        DeviceRun run = device.run(formats, 0, end);
        run.rule = StepRule::kSgd;
        StepRequest request = request_of(kAdam, 0.01, 4);
        request.rule = StepRule::kSgd;
        request.sgd = cpu.constants();
        for (std::int64_t t = 1; t <= 3; ++t) {
          cpu.step({.gradient_scale = 0.25f, .lr = 0.01f, .step = t}, problem.slice(0, end, cpu.num_states()));
          step.decide(request);
          check(cuda::update_step(run, step.tables, nullptr));
        }
        device.read_back(got);
        EXPECT_TRUE(same_bits(got, problem)) << static_cast<int>(weights) << " " << static_cast<int>(states);
      }
    }
  }
  DeviceRun bytes;
  bytes.rule = StepRule::kSgd;
  bytes.arguments.numel = 1;
  bytes.arguments.states = StateDType::k8Bit;
  EXPECT_EQ(cuda::update_step(bytes, {}, nullptr), cudaErrorInvalidValue);
}

TEST_F(DeviceKernels, MessagesAreReadInRankOrder) {
  // Two groups of 2 and 1 parameters; three ranks, of which 2 and 0 have the parts of gradients, in this order.
  constexpr std::uint32_t kNodes[] = {2, 1};  // a part's, by group
  constexpr std::size_t kNodesOffset = sizeof(StepMessageHeader) + 8, kBytes = kNodesOffset + 3 * sizeof(NormNode);
  std::vector<std::byte> messages(3 * kBytes);
  const auto node_of = [](int rank, int i) { return NormNode{.level = 1, .index = 7, .sum = rank * 10.0 + i}; };
  for (int rank = 0; rank < 3; ++rank) {
    std::byte* const message = messages.data() + kBytes * static_cast<std::size_t>(rank);
    const StepMessageHeader header{.loss = 0.1 * (rank + 1), .tokens = rank, .samples = 2 * rank, .gathers = 5};
    std::memcpy(message, &header, sizeof header);
    message[sizeof header + static_cast<std::size_t>(rank % 2)] = std::byte{1};
    for (int i = 0; i < 3; ++i) {
      const NormNode node = node_of(rank, i);
      std::memcpy(message + kNodesOffset + static_cast<std::size_t>(i) * sizeof node, &node, sizeof node);
    }
  }
  DeviceStep step({{0, 2}, {2, 1}});
  Shared<std::byte> device_messages(messages);
  const Shared<std::int32_t> part_ranks({2, 0});
  const Shared<std::uint32_t> first_node({0, 2 * kNodes[0], 2 * (kNodes[0] + kNodes[1])});
  const Shared<NormNode> nodes{std::vector<NormNode>(6)};
  step.tables.ranks = 3;
  step.tables.shard_size = 3;
  step.tables.parts = 2;
  step.tables.message_bytes = kBytes;
  step.tables.nodes_offset = kNodesOffset;
  step.tables.messages = device_messages.data();
  step.tables.part_ranks = part_ranks.data();
  step.tables.first_node = first_node.data();
  step.tables.nodes = nodes.data();
  check(cuda::read_messages(step.tables, nullptr));
  const DeviceDecision decision = step.decision.values()[0];
  EXPECT_EQ(decision.loss, 0.1 / 3 + 0.2 / 3 + 0.1 * 3 / 3);
  EXPECT_EQ(decision.tokens, 3);
  EXPECT_EQ(decision.samples, 6);
  EXPECT_EQ(decision.gathers_differ, 0);
  EXPECT_EQ(step.used.values(), (std::vector<std::uint8_t>{1, 1, 0}));
  std::vector<double> sums;
  for (const NormNode& node : nodes.values()) sums.push_back(node.sum);
  EXPECT_EQ(sums, (std::vector<double>{20, 21, 0, 1, 22, 2}));

  reinterpret_cast<StepMessageHeader*>(device_messages.data() + kBytes)->gathers = 6;
  check(cuda::read_messages(step.tables, nullptr));
  EXPECT_EQ(step.decision.values()[0].gathers_differ, 1);
  step.decide(request_of(kAdam, 0.01));
  EXPECT_EQ(step.decision.values()[0].is_skipped, 1);
  EXPECT_EQ(step.decision.values()[0].is_overflow, 0);
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
