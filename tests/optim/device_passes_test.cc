// Compares rules that make a step in several passes. CUDA kernels and the CPU's loops give the same bits.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "optim/grad_norm.h"
#include "optim/layerwise_optimizer.h"
#include "optim/master_assigner.h"
#include "optim/muon_optimizer.h"
#include "tests/optim/device_problem.h"

namespace tessera {
namespace device_passes_test {

using DevicePasses = DeviceKernels;

/// The second parameter gets no gradient.
TEST_F(DevicePasses, MuonsPassesGiveTheCpusBits) {
  constexpr std::size_t kUsed = 1280, kEnd = 1500;
  for (const WeightFormat weights : kWeights) {
    for (const StateDType states : kStates) {
      SCOPED_TRACE("weights " + std::to_string(static_cast<int>(weights)) + ", states " +
                   std::to_string(static_cast<int>(states)));
      OptimizerConfig config{.type = OptimizerType::kMuon, .weight_decay = 0.1, .state_dtype = states};
      const MuonOptimizer cpu(config);
      config.type = OptimizerType::kSgd;  // SGD has the same states
      config.momentum = 0.9;
      const RuleOptimizer like(config);
      StepProblem problem = finite_problem(kEnd, {weights, cpu}), got = problem;
      const DeviceProblem device(problem);
      const Shared<std::uint8_t> is_matrix(std::vector<std::uint8_t>{1, 1});
      const Shared<ParameterBegin> begins(std::vector<ParameterBegin>{{0, 0}, {kUsed / kParameterAlign, 1}});
      QueuedStep step({{0, 2}});
      step.tables.is_matrix = is_matrix.data();
      step.used.set(1, 0);
      DeviceRun update = device.run(like, problem, 0, kEnd);
      update.parameters = 2;
      update.begins = begins.data();
      DeviceRun directions = update;
      update.takes_direction = true;
      update.arguments.states[0] = {};
      directions.arguments.master = device.gradient.data();
      directions.arguments.low = nullptr;
      directions.arguments.parameter = nullptr;
      directions.arguments.weights = WeightFormat::kF32;
      directions.arguments.clip_value = 0.5f;
      StepRequest request = request_of(RuleOptimizer(adamw()), 0.01, 4);
      request.of_matrices = cpu.step_numbers();
      for (std::int64_t t = 1; t <= 2; ++t) {
        step.decide(request);
        check(cuda::muon_directions(directions, cpu.momentum_constants(), step.tables, nullptr));
        cpu.direction({.gradient_scale = 0.25f, .clip_value = 0.5f, .lr = 0.01f, .step = t}, problem.slice(0, kUsed),
                      {problem.gradient.data(), kUsed});
        EXPECT_TRUE(same_bits(device.gradient.values(), problem.gradient));
        check(cuda::update_step(update, step.tables, nullptr));
        cpu.step({.lr = 0.01f, .step = t}, problem.slice(0, kUsed));
        device.read_back(got);
        EXPECT_TRUE(same_bits(got, problem)) << t;
      }
    }
  }
}

/// This step updates the first parameter for the first time, and the second parameter once more. The third parameter
/// was updated only before this step, and the fourth parameter never was.
TEST_F(DevicePasses, ReadingAndAssigningMastersGivesTheCpusBits) {
  constexpr std::size_t kEnds[] = {352, 800, 1024, 1500};
  for (const WeightFormat weights : kWeights) {
    SCOPED_TRACE("weights " + std::to_string(static_cast<int>(weights)));
    const MasterAssigner cpu(adamw(), {.decay = 0.9});
    const RuleOptimizer like(sgd_without_states(adamw()), {.decay = 0.9});
    StepProblem problem = finite_problem(kEnds[3], {weights, cpu}), got = problem;
    const DeviceProblem device(problem);
    std::vector<ParameterBegin> begin_of;
    for (std::uint32_t p = 0; p < 4; ++p) {
      begin_of.push_back({static_cast<std::uint32_t>((p == 0 ? 0 : kEnds[p - 1]) / kParameterAlign), p});
    }
    const Shared<ParameterBegin> begins(begin_of);
    QueuedStep step({{0, 4}});
    step.steps.set(1, 4);
    step.steps.set(2, 4);
    step.used.set(2, 0);
    step.used.set(3, 0);
    DeviceRun run = device.run(like, problem, 0, kEnds[3]);
    run.parameters = 4;
    run.begins = begins.data();

    const Shared<float> masters(std::vector<float>(kEnds[3] + 1, -7.0f));
    check(cuda::read_weights(run, masters.data(), nullptr));
    std::vector<float> wanted(kEnds[3] + 1, -7.0f);
    cpu.read(problem.slice(0, kEnds[3]), 0, kEnds[3], wanted.data());
    EXPECT_TRUE(same_bits(masters.values(), wanted));

    step.decide(request_of(like, 0.01));
    check(cuda::assign_weights(run, step.tables, nullptr));
    cpu.step({.step = 1, .is_first_of_run = true}, problem.slice(0, kEnds[0]));
    cpu.step({.step = 5}, problem.slice(kEnds[0], kEnds[1]));
    cpu.average(problem.slice(kEnds[1], kEnds[2]));
    device.read_back(got);
    EXPECT_TRUE(same_bits(got, problem));

    step.sum.set(0, HUGE_VAL);
    step.decide(request_of(like, 0.01));
    check(cuda::assign_weights(run, step.tables, nullptr));
    device.read_back(got);
    EXPECT_TRUE(same_bits(got, problem)) << "a step that is skipped";
  }
}

/// The norms of four tensors, as two ranks sent them. Each rank sent sums for a half of the third tensor. Only one rank
/// sent sums for each of the other tensors. The second tensor has only zeros.
struct SentNorms {
  static constexpr int kTensors = 4;
  const std::vector<std::uint64_t> numels = {256, 256, 512, 256};
  const std::vector<std::vector<NormRun>> parts = {
      {{.begin = 0, .numel = 256, .tensor = 0},
       {.begin = 256, .numel = 256, .tensor = 2, .is_last = false},
       {.begin = 512, .numel = 256, .tensor = 3}},
      {{.begin = 0, .numel = 256, .tensor = 1}, {.begin = 256, .numel = 256, .first_block = 1, .tensor = 2}}};
  const NormTotals totals{numels, parts};
  const int kinds;
  std::vector<double> messages;
  std::vector<std::vector<double>> squares;  ///< [kind][tensor], as the CPU sums them

  explicit SentNorms(int of_kinds) : kinds(of_kinds) {
    const std::size_t most = totals.most_sums();
    EXPECT_EQ(most, 3U);
    messages.resize(2 * static_cast<std::size_t>(kinds) * most);
    // Rank 1 has the first part.
    for (std::size_t i = 0; i < messages.size(); ++i) messages[i] = 0.7 + 1.3 * static_cast<double>(i);
    for (std::size_t kind = 0; kind < static_cast<std::size_t>(kinds); ++kind) {
      const double* const of_rank[] = {messages.data() + kind * most,
                                       messages.data() + (static_cast<std::size_t>(kinds) + kind) * most};
      const double* const of_part[] = {of_rank[1], of_rank[0]};
      messages[kind * most] = 0;
      totals.add_up(of_part, squares.emplace_back(kTensors));
    }
  }
};

/// The same norms in the form that a kernel gets. `tensor`: LayerTables::tensor.
struct NormsOnDevice {
  explicit NormsOnDevice(const SentNorms& sent, const std::vector<std::uint32_t>& tensor = {0, 1, 2, 3})
      : messages(sent.messages),
        links({sent.totals.links().begin(), sent.totals.links().end()}),
        first_link({sent.totals.first_link().begin(), sent.totals.first_link().end()}),
        numbers(tensor),
        scratch(std::vector<double>(2 * sent.totals.links().size())) {
    tables.kinds = sent.kinds;
    tables.most_sums = sent.totals.most_sums();
    tables.parameters = SentNorms::kTensors;
    tables.groups = 1;
    tables.part_ranks = part_ranks.data();
    tables.links = links.data();
    tables.first_link = first_link.data();
    tables.tensor = numbers.data();
    tables.messages = messages.data();
    tables.link_scratch = scratch.data();
    tables.squares = squares.data();
  }
  const Shared<std::int32_t> part_ranks{std::vector<std::int32_t>{1, 0}};
  const Shared<double> messages;
  const Shared<NormLink> links;
  const Shared<std::uint32_t> first_link, numbers;
  const Shared<double> scratch, squares{std::vector<double>(8)};
  LayerTables tables;
};

/// The parameters are in another order than their tensors, and the last parameter is unused.
TEST_F(DevicePasses, LambsAndLarsPassesGiveTheCpusBits) {
  constexpr std::size_t kEnds[] = {256, 512, 1280, 1500};
  const std::vector<std::uint32_t> tensor = {2, 3, 0, 1};
  constexpr std::size_t kUsed = 3;
  std::vector<OptimizerConfig> configs = {{.type = OptimizerType::kLamb, .weight_decay = 0.1},
                                          {.type = OptimizerType::kLars, .weight_decay = 0.1, .momentum = 0.9},
                                          {.type = OptimizerType::kLars, .weight_decay = 0.1}};
  configs[1].nesterov = true;
  configs[1].trust_coefficient = 0.02;
  for (OptimizerConfig& config : configs) {
    for (const WeightFormat weights : kWeights) {
      for (const StateDType states : kStates) {
        if (states != StateDType::kF32 && config.type == OptimizerType::kLars && config.momentum == 0) continue;
        config.state_dtype = states;
        SCOPED_TRACE("rule " + std::to_string(static_cast<int>(config.type)) + ", weights " +
                     std::to_string(static_cast<int>(weights)) + ", states " +
                     std::to_string(static_cast<int>(states)));
        const LayerwiseOptimizer cpu(config, {.decay = 0.9});
        const bool is_lamb = cpu.makes_directions();
        StepProblem problem = finite_problem(kEnds[3], {weights, cpu}), got = problem;
        const DeviceProblem device(problem);

        const SentNorms sent(is_lamb ? 2 : 1);
        const NormsOnDevice layers(sent, tensor);

        std::vector<ParameterBegin> begin_of;
        for (std::uint32_t p = 0; p < 4; ++p) {
          begin_of.push_back({static_cast<std::uint32_t>((p == 0 ? 0 : kEnds[p - 1]) / kParameterAlign), p});
        }
        const Shared<ParameterBegin> begins(begin_of);
        const std::vector<double> gradient_squares = {3.5, 0.25, 7, 11};
        const Shared<double> of_gradients(gradient_squares);
        QueuedStep step({{0, 4}});
        step.tables.norm.tensors = SentNorms::kTensors;
        step.tables.norm.squares = of_gradients.data();
        step.used.set(3, 0);
        DeviceRun update = device.run(cpu.elements(), problem, 0, kEnds[3]);
        update.parameters = 4;
        update.begins = begins.data();
        DeviceRun directions = update;
        if (is_lamb) {
          update.rule = StepRule::kSgd;
          update.takes_direction = true;
          for (StateArgument& state : update.arguments.states) state = {};
          directions.direction = device.gradient.data();
          directions.arguments.clip_value = 0.5f;
          directions.arguments.average = {};
        }
        StepRequest request = request_of(cpu.elements(), 0.01, 4);
        request.trust_coefficient = config.trust_coefficient;
        for (std::int64_t t = 1; t <= 2; ++t) {
          const StepScalars scalars{.gradient_scale = 0.25f,
                                    .clip_value = is_lamb ? 0.5f : 0.0f,
                                    .lr = 0.01f,
                                    .step = t,
                                    .is_first_of_run = t == 1};
          step.decide(request);
          if (is_lamb) {
            check(cuda::update_step(directions, step.tables, nullptr));
            cpu.measure(scalars, problem.slice(0, kEnds[2]), {problem.gradient.data(), kEnds[2]}, [](auto&&...) {});
            EXPECT_TRUE(same_bits(device.gradient.values(), problem.gradient));
          }
          check(cuda::adapt_rates(request, layers.tables, step.tables, nullptr));
          check(cuda::update_step(update, step.tables, nullptr));
          for (std::size_t p = 0; p < kUsed; ++p) {
            const double weight = std::sqrt(sent.squares[0][p]);
            const double moved =
                is_lamb ? std::sqrt(sent.squares[1][p]) : std::sqrt(gradient_squares[tensor[p]]) * 0.25f;
            StepScalars own = scalars;
            own.lr = static_cast<float>(own.lr * cpu.trust_ratio(weight, moved));
            const std::size_t begin = p == 0 ? 0 : kEnds[p - 1];
            cpu.step(own, problem.slice(0, kEnds[3]), begin, kEnds[p] - begin);
          }
          device.read_back(got);
          EXPECT_TRUE(same_bits(got, problem)) << t;
        }
      }
    }
  }
}

/// Each group has its own rate, and the second group is not adapted.
TEST_F(DevicePasses, UnadaptedGroupsKeepTheirRates) {
  const LayerwiseOptimizer cpu({.type = OptimizerType::kLamb, .weight_decay = 0.1});
  const SentNorms sent(2);
  NormsOnDevice layers(sent);
  layers.tables.groups = 2;
  const Shared<GroupNumbers> groups(std::vector<GroupNumbers>{
      {cpu.elements().numbers(), 0.5, NAN}, {.numbers = cpu.elements().numbers(), .lr = 0.25, .adapts_layers = false}});
  const Shared<std::uint32_t> number(std::vector<std::uint32_t>{0, 1, 1, 2});
  QueuedStep step({{0, 3}, {3, 1}});
  step.tables.norm.tensors = SentNorms::kTensors;
  step.tables.group_numbers = groups.data();
  step.tables.group_number = number.data();
  const StepRequest request = request_of(cpu.elements(), 0.01);
  step.decide(request);
  EXPECT_EQ(step.uniform.values()[1], 1);
  check(cuda::adapt_rates(request, layers.tables, step.tables, nullptr));
  const std::vector<RuleConstants> constants = step.constants.values();
  for (std::size_t p = 0; p < 4; ++p) {
    const float rate = p == 0 ? 0.01f : p == 3 ? 0.25f : static_cast<float>(0.01 * 0.5);
    const double ratio = p % 2 == 1 ? 1 : std::sqrt(sent.squares[0][p]) / std::sqrt(sent.squares[1][p]);
    const auto wanted = rule_constants(StepRule::kSgd, RuleNumbers{}, 1, static_cast<float>(rate * ratio));
    EXPECT_EQ(constants_for(constants[p], SgdRule{}).lr, constants_for(wanted, SgdRule{}).lr) << p;
  }
  EXPECT_EQ(step.uniform.values()[0], 0) << "rates differ";
  EXPECT_EQ(step.uniform.values()[1], 1);

  step.sum.set(0, HUGE_VAL);
  step.decide(request);
  step.constants.set(0, RuleConstants{});
  check(cuda::adapt_rates(request, layers.tables, step.tables, nullptr));
  EXPECT_EQ(constants_for(step.constants.values()[0], SgdRule{}).lr, 0.0f) << "a step that is skipped";
}

/// The norms in backward are those of one unit, and the unit's parameters need not be the first ones of the step.
TEST_F(DevicePasses, NormsOfAUnitLeaveOtherParametersAlone) {
  const LayerwiseOptimizer cpu({.type = OptimizerType::kLamb, .weight_decay = 0.1});
  const SentNorms sent(2);
  NormsOnDevice layers(sent);
  layers.tables.first_parameter = 2;
  layers.tables.first_group = 1;
  QueuedStep step({{0, 2}, {2, SentNorms::kTensors}, {6, 2}});
  const StepRequest request = request_of(cpu.elements(), 0.01);
  step.decide(request);
  for (const std::size_t other : {0, 1, 6, 7}) step.constants.set(other, RuleConstants{});
  check(cuda::adapt_rates(request, layers.tables, step.tables, nullptr));
  const std::vector<RuleConstants> constants = step.constants.values();
  for (const std::size_t other : {0, 1, 6, 7}) EXPECT_EQ(constants_for(constants[other], SgdRule{}).lr, 0.0f) << other;
  for (std::size_t i = 0; i < SentNorms::kTensors; ++i) {
    const double ratio = i == 1 ? 1 : std::sqrt(sent.squares[0][i]) / std::sqrt(sent.squares[1][i]);
    EXPECT_EQ(constants_for(constants[2 + i], SgdRule{}).lr, static_cast<float>(0.01f * ratio)) << i;
  }
  EXPECT_EQ(step.uniform.values()[0], 1);
  EXPECT_EQ(step.uniform.values()[1], 0) << "rates differ";
  EXPECT_EQ(step.uniform.values()[2], 1);
}

}  // namespace device_passes_test
}  // namespace tessera
