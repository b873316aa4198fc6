// Tests "reproducible": any number of ranks with the same microbatches gives the same bits.

#include <gtest/gtest.h>
#include <stdlib.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/checkpoint.h"
#include "tessera/durable.h"
#include "tests/engine/files/reproducible_runs.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace reproducible_test {

const Placed kPlaced[] = {ShardingStrategy::kNoShard,
                          ShardingStrategy::kShardOptimizer,
                          ShardingStrategy::kShardGradients,
                          ShardingStrategy::kShardGradOp,
                          ShardingStrategy::kFullShard,
                          Placed(ShardingStrategy::kShardOptimizer, /*shared=*/true),
                          Placed(ShardingStrategy::kFullShard, /*shared=*/true)};

TEST(Reproducible, AnyNumberOfRanksGivesTheBitsOfOne) {
  const World worlds[] = {{2, 1, 8},  {4, 1, 8},  {8, 1, 8},  {2, 2, 8},  {4, 2, 8},  {3, 1, 12},
                          {6, 1, 12}, {3, 3, 12}, {3, 1, 24}, {4, 1, 24}, {2, 1, 24}, {6, 1, 24},
                          {8, 1, 24}, {4, 2, 12}, {8, 2, 24}, {2, 2, 6}};
  const auto exists = [](const World& world, const Placed&, DType, const Rule&, GradientSync sync) {
    return goes(world, sync);
  };
  const TestFolder folder;
  const auto saved = [&](int run) { return folder / std::to_string(run); };
  MadeOnce<TrainedStates> alone;
  std::set<std::string> with_states;  // rules and placements whose optimizer states have been compared
  int runs = 0;
  for (const auto& each : pairwise_where(exists, worlds, kPlaced, kDTypes, kRules, kBothSyncs)) {
    const auto& [world, placed, dtype, rule, sync] = each;
    const std::string what = std::string(name_of(dtype)) + ", " + rule.name + ", " + std::to_string(world.all);
    ++runs;
    const TrainedStates& wanted = alone(what, [&, &dtype = dtype, &rule = rule, &world = world] {
      return train({}, reproducible(ShardingStrategy::kFullShard, dtype, rule, GradientSync::kEachMicrobatch),
                   {.all = world.all, .saves = saved(-runs)});
    });
    RunOptions run{.all = world.all};
    const bool is_new = with_states.insert(rule.name + name_of(placed)).second;
    if (is_new || tests_are_long()) run.saves = saved(runs);
    const TrainedStates trained =
        train({.ranks = world.ranks, .hosts = world.hosts}, reproducible(placed, dtype, rule, sync), run);
    EXPECT_EQ(trained.states.empty(), run.saves.empty());
    expect_same_bits(trained, wanted,
                     what + ", " + name_of(placed) + " on " + text_of(world) +
                         (sync == GradientSync::kLastMicrobatch ? ", last" : ", each"));
  }
  EXPECT_GT(runs, 50);
}

// If the key is not set, another number of ranks adds in another order, and gives other bits. If the bits were the
// same, the test above would prove nothing.
TEST(Reproducible, WithoutTheKeyBitsDependOnRanks) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kFullShard);
  strategy.reproducible = false;
  const Trained one = train({}, strategy, {}, 8), four = train({.ranks = 4}, strategy, {}, 8);
  bool differs = false;
  for (std::size_t i = 0; i < one.values.size(); ++i)
    differs = differs || !same_bits(one.values[i].second, four.values[i].second);
  EXPECT_TRUE(differs);
}

TEST(Reproducible, ReplicasGiveTheSameBits) {
  for (const GradientSync sync : {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch}) {
    const Trained wanted = train({}, reproducible(ShardingStrategy::kFullShard, DType::kF32, kRules[0], sync), {}, 8);
    for (const bool shared : {false, true}) {
      for (const bool over_world : {false, true}) {
        const Placed placed(ShardingStrategy::kHybridShard, shared);
        Strategy strategy = reproducible(placed, DType::kF32, kRules[0], sync);
        strategy.optimizer.shard_over_world = over_world;
        expect_same_bits(train({.ranks = 4, .hosts = 2}, strategy, {}, 8), wanted,
                         name_of(placed) + (over_world ? " over the world" : ""));
      }
    }
  }
}

// Replicas of three ranks are not subtrees of the tree of sums. Runs of three microbatches are not subtrees either.
TEST(Reproducible, ReplicasThatAreNoSubtreesSendSumsOfSubtrees) {
  const GradientSync last = GradientSync::kLastMicrobatch;
  const Strategy alone = reproducible(ShardingStrategy::kFullShard, DType::kF32, kRules[0], last);
  for (const World& world : {World{6, 2, 6}, World{6, 2, 12}, World{4, 2, 12}}) {
    const Trained wanted = train({}, alone, {}, world.all);
    for (const bool shared : {false, true}) {
      const Placed placed(ShardingStrategy::kHybridShard, shared);
      Strategy strategy = reproducible(placed, DType::kF32, kRules[0], last);
      strategy.optimizer.shard_over_world = !shared;
      expect_same_bits(train({.ranks = world.ranks, .hosts = world.hosts}, strategy, {}, world.all), wanted,
                       name_of(placed) + " on " + text_of(world));
    }
  }
}

// If a leaf of the tree gets no microbatch in a short step, it is zero on every rank.
TEST(Reproducible, AShortStepWithRunsThatCutSubtreesEndsWithFiniteNumbers) {
  Strategy strategy =
      reproducible(ShardingStrategy::kShardGradients, DType::kF32, kRules[0], GradientSync::kLastMicrobatch);
  strategy.gradient_accumulation = 3;
  std::array<double, 2> norms{};
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    at::set_num_threads(1);
    Tiny model = make_tiny({}, /*deferred=*/false);
    Engine engine(model.ptr(), strategy, mesh);
    const Batch batch = make_batches(1, 4, kLength, 19)[0];
    engine.backward(model->forward(batch.tokens, batch.targets));
    norms[static_cast<std::size_t>(mesh.rank())] = engine.step(/*partial=*/true).grad_norm;
  });
  EXPECT_TRUE(std::isfinite(norms[0]) && norms[0] > 0) << norms[0];
  EXPECT_EQ(norms[0], norms[1]);
}

// The models have a block that is never used, a block that is used twice, a tied head, and a frozen block.
TEST(Reproducible, UnusedAndSharedParametersGiveTheSameBits) {
  const TinyOptions models[] = {
      {.unused_block = true}, {.shared_block = true}, {.tied_head = true}, {.frozen_first_block = true}};
  for (const TinyOptions& model : models) {
    for (const GradientSync sync : {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch}) {
      const Strategy strategy = reproducible(ShardingStrategy::kFullShard, DType::kF32, kRules[0], sync);
      expect_same_bits(train({.ranks = 4}, strategy, model, 8), train({}, strategy, model, 8), "four ranks");
      if (sync == GradientSync::kLastMicrobatch)
        expect_same_bits(train({.ranks = 4}, strategy, model, 12), train({}, strategy, model, 12), "three each");
    }
  }
}

/// A model that draws random numbers in forward.
struct DroppingImpl : torch::nn::Module {
  DroppingImpl()
      : up(register_module("up", torch::nn::Linear(6, 40))),
        drop(register_module("drop", torch::nn::Dropout(0.4))),
        down(register_module("down", torch::nn::Linear(40, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return down(drop(at::relu(up(x)))); }
  torch::nn::Linear up;
  torch::nn::Dropout drop;
  torch::nn::Linear down;
};
TORCH_MODULE(Dropping);

/// A part of a run of Dropping. A step has eight microbatches.
struct Part {
  std::int64_t begin = 0, end = 6;           ///< steps
  std::filesystem::path from = {}, to = {};  ///< a checkpoint's folder to continue from; where checkpoint or values go
  bool saves = false;                        ///< the run saves a checkpoint, and not values
  std::uint64_t seed = 7;
  std::filesystem::path commits = {};  ///< durable.dir, if the run continues from commits and commits its steps
};

void train_dropping(const Mesh& mesh, const Part& part, GradientSync sync) {
  constexpr std::int64_t kAll = 8, kRows = 3;
  at::manual_seed(part.seed);
  Dropping model;
  Strategy strategy;
  strategy.reproducible = true;
  strategy.gradient_sync = sync;
  strategy.gradient_accumulation = kAll / mesh.world_size();
  strategy.optimizer.lr = 0.05;
  const bool commits = !part.commits.empty();
  if (commits) strategy.durable = {.every = 1, .dir = part.commits.string()};
  Engine engine(model, strategy, mesh);
  if (commits) {
    const std::optional<LoadedCheckpoint> resumed = resume_durable(engine);
    require((resumed ? resumed->step : 0) == part.begin, "the run did not go on from its last commit");
  }
  if (!part.from.empty()) {
    const LoadedCheckpoint loaded = load_checkpoint(engine, part.from);
    require(loaded.inexact.empty() && loaded.step == part.begin, "the checkpoint was not read exactly");
  }
  std::vector<double> losses;
  for (std::int64_t step = part.begin; step < part.end; ++step) {
    const at::Tensor x = at::sin(at::arange(kAll * kRows * 6, at::kFloat) * (1.0 + static_cast<double>(step)))
                             .reshape({kAll * kRows, 6});
    for (std::int64_t round = 0; round < strategy.gradient_accumulation; ++round) {
      const at::Tensor rows = x.narrow(0, engine.microbatch() * kRows, kRows);
      engine.backward((model->forward(rows) - rows.narrow(1, 0, 3)).square().mean());
    }
    losses.push_back(engine.step().loss);
    if (commits) commit_durable(engine);
  }
  if (commits) finish_commit(engine);
  if (part.saves) {
    save_checkpoint(engine, part.to);
    return;
  }
  const Gathered gathered(engine);
  if (mesh.rank() != 0) return;
  std::ofstream out(part.to, std::ios::binary);
  out.write(reinterpret_cast<const char*>(losses.data() + losses.size() - 1), sizeof(double));
  for (const auto& [name, value] : values_of(*model))
    out.write(static_cast<const char*>(value.const_data_ptr()), static_cast<std::streamsize>(value.nbytes()));
}

/// Makes one step of Dropping, saves it in `to`, and commits it if the strategy has "durable".
void save_dropping(const Mesh& mesh, const Strategy& strategy, const std::filesystem::path& to) {
  Dropping model;
  Engine engine(model, strategy, mesh);
  engine.backward(model->forward(at::ones({4, 6})).square().mean());
  engine.step();
  save_checkpoint(engine, to);
  if (strategy.durable.every == 0) return;
  commit_durable(engine);
  finish_commit(engine);
}

std::string bytes_of_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

/// Returns the last loss and all values of the part `part` of a run, as bytes.
std::string dropped(int ranks, int hosts, GradientSync sync, Part part) {
  const TestFolder folder;
  part.to = folder.path() / "values";
  on_hosts(ranks, hosts, [&](const Mesh& mesh) { train_dropping(mesh, part, sync); });
  return bytes_of_file(part.to);
}

// Ranks are processes here, each with its own generator.
TEST(ReproducibleProcesses, DropoutIsTheSameWhoeverComputesAMicrobatch) {
  at::set_num_threads(1);
  const std::string alone = dropped(1, 1, GradientSync::kEachMicrobatch, {});
  ASSERT_GT(alone.size(), sizeof(double));
  EXPECT_NE(dropped(1, 1, GradientSync::kEachMicrobatch, {.seed = 8}), alone) << "the run's seed counts";
  for (const auto& [ranks, hosts] : {std::pair(2, 1), {2, 2}, {4, 1}, {4, 2}, {8, 1}}) {
    for (const GradientSync sync : kBothSyncs)
      EXPECT_TRUE(dropped(ranks, hosts, sync, {}) == alone) << ranks << " ranks on " << hosts << " hosts";
  }
}

TEST(ReproducibleProcesses, ACheckpointGoesOnWithOtherRanksToTheSameBits) {
  at::set_num_threads(1);
  const std::string alone = dropped(1, 1, GradientSync::kEachMicrobatch, {});
  for (const GradientSync sync : kBothSyncs) {
    const TestFolder folder;
    on_hosts(2, 1, [&](const Mesh& mesh) {
      train_dropping(mesh, {.end = 3, .to = folder.path() / "saved", .saves = true}, sync);
    });
    // The new run first has another seed, and then takes the seed of the checkpoint.
    const Part rest{.begin = 3, .from = folder.path() / "saved", .seed = 99};
    for (const int ranks : {1, 4})
      EXPECT_TRUE(dropped(ranks, 1, sync, rest) == alone) << "went on with " << ranks << " ranks";
  }
}

// Two ranks commit. Then one rank goes on, and then four ranks do. They first have another seed.
TEST(ReproducibleProcesses, CommitsGoOnWithOtherRanksToTheSameBits) {
  at::set_num_threads(1);
  const std::string alone = dropped(1, 1, GradientSync::kEachMicrobatch, {});
  for (const GradientSync sync : kBothSyncs) {
    const TestFolder folder;
    const std::filesystem::path commits = folder / "commits";
    dropped(2, 1, sync, {.end = 2, .commits = commits});
    dropped(1, 1, sync, {.begin = 2, .end = 4, .seed = 99, .commits = commits});
    EXPECT_TRUE(dropped(4, 1, sync, {.begin = 4, .seed = 98, .commits = commits}) == alone);
  }
}

// The checkpoint and the commit of a run with one thread are loaded with two.
TEST(Reproducible, AnotherNumberOfThreadsIsRefusedUnlessItIsAllowed) {
  const TestFolder folder;
  const std::filesystem::path saved = folder.path() / "saved", plain = folder.path() / "plain";
  run_ranks({}, [&](const Mesh& mesh) {
    at::set_num_threads(1);
    Strategy strategy;
    save_dropping(mesh, strategy, plain);
    strategy.reproducible = true;
    strategy.durable = {.every = 1, .dir = (folder.path() / "durable").string()};
    save_dropping(mesh, strategy, saved);
    at::set_num_threads(2);
    Dropping model;
    Engine engine(model, strategy, mesh);
    for (const bool commits : {true, false}) {
      const auto go_on = [&] { commits ? void(resume_durable(engine)) : void(load_checkpoint(engine, saved)); };
      const std::string text = error_of(ExitCode::kConfig, go_on);
      EXPECT_NE(text.find(commits ? "durable: /reproducible: " : "1: /reproducible: "), std::string::npos) << text;
      EXPECT_NE(text.find("threads 2, the run before has 1. "), std::string::npos) << text;
      EXPECT_NE(text.find("--allow-other-processor"), std::string::npos) << text;
    }
    const std::string said = stderr_of([&] {
      set_log_level(LogLevel::kInfo);
      EXPECT_TRUE(load_checkpoint(engine, plain).inexact.empty());
    });
    EXPECT_NE(said.find("does not say with how many threads"), std::string::npos) << said;
    setenv("TESSERA_ALLOW_OTHER_PROCESSOR", "1", /*overwrite=*/1);
    for (const bool commits : {true, false}) {
      const LoadedCheckpoint loaded = commits ? resume_durable(engine).value() : load_checkpoint(engine, saved);
      ASSERT_EQ(loaded.inexact.size(), 1u) << commits;
      EXPECT_NE(loaded.inexact[0].find("threads 2, the run before has 1"), std::string::npos) << loaded.inexact[0];
    }
    unsetenv("TESSERA_ALLOW_OTHER_PROCESSOR");
    at::set_num_threads(1);
    EXPECT_EQ(error_of([&] { load_checkpoint(engine, saved); }), "") << "the threads of the run that saved it";
  });
}

// A block runs twice with recomputation. It has two gradients in one backward, since each recomputation has its own
// backward.
TEST(Reproducible, SeveralGradientsOfOneBackwardAreOfOneLeafOrRefused) {
  const TinyOptions model{.shared_block = true, .recompute = true};
  Strategy strategy = reproducible(ShardingStrategy::kFullShard, DType::kF32, kRules[0], GradientSync::kLastMicrobatch);
  expect_same_bits(train({.ranks = 4}, strategy, model, 8), train({}, strategy, model, 8), "last_microbatch");
  expect_same_bits(train({.ranks = 8}, strategy, model, 8), train({}, strategy, model, 8), "one microbatch a rank");
  strategy.gradient_sync = GradientSync::kEachMicrobatch;
  const std::string told = error_of([&] { train({.ranks = 4}, strategy, model, 8); });
  EXPECT_NE(told.find("got one more gradient in the same backward"), std::string::npos) << told;
  EXPECT_NE(told.find("set gradient_sync to \"last_microbatch\""), std::string::npos) << told;
}

// If gradients are stored until the microbatch ends, two losses of a microbatch are one leaf.
TEST(Reproducible, SeveralLossesOfAMicrobatchAreOneLeafOrRefused) {
  const auto train_twice = [](const Mesh& mesh, GradientSync sync) {
    at::set_num_threads(1);
    Tiny model = make_tiny({}, /*deferred=*/false);
    Strategy strategy = reproducible(ShardingStrategy::kFullShard, DType::kF32, kRules[0], sync);
    strategy.gradient_accumulation = 4 / mesh.world_size();
    Engine engine(model.ptr(), strategy, mesh);
    const Batch batch = make_batches(1, 8, kLength, 19)[0];
    for (std::int64_t round = 0; round < strategy.gradient_accumulation; ++round) {
      const std::int64_t begin = 2 * engine.microbatch();
      const at::Tensor loss = model->forward(batch.tokens.narrow(0, begin, 2), batch.targets.narrow(0, begin, 2));
      engine.backward(loss, {.retain_graph = true});
      engine.backward(loss * 0.5);
    }
    const StepResult step = engine.step();
    const Gathered gathered(engine);
    return std::pair(step.grad_norm, values_of(*model));
  };
  std::vector<std::pair<double, std::vector<std::pair<std::string, at::Tensor>>>> results;
  for (const int ranks : {1, 2, 4}) {
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      auto result = train_twice(mesh, GradientSync::kLastMicrobatch);
      if (mesh.rank() == 0) results.push_back(std::move(result));
    });
  }
  for (const auto& result : results) {
    EXPECT_EQ(result.first, results[0].first);
    for (std::size_t i = 0; i < result.second.size(); ++i)
      EXPECT_TRUE(same_bits(result.second[i].second, results[0].second[i].second)) << result.second[i].first;
  }
  const std::string told = error_of(
      [&] { run_ranks({.ranks = 2}, [&](const Mesh& mesh) { train_twice(mesh, GradientSync::kEachMicrobatch); }); });
  EXPECT_NE(told.find("backward with retain_graph under \"reproducible\""), std::string::npos) << told;
}

/// Trains Tiny with a slow rank 1, and with microbatches that may be dealt by speed. `counts` gets the number of
/// microbatches of this rank in each step.
Trained train_dealt(const Mesh& mesh, const Strategy& strategy, std::vector<std::int64_t>& counts) {
  at::set_num_threads(1);
  const TinyOptions options;
  Tiny model = make_tiny(options, /*deferred=*/true);
  Engine engine(model.ptr(), strategy, mesh);
  Trained trained;
  const std::int64_t rows = kBatch / (strategy.gradient_accumulation * mesh.world_size());
  for (const Batch& batch : make_batches(4, kBatch, kLength, options.vocab)) {
    const MicrobatchRun run = engine.microbatches();
    counts.push_back(run.end - run.begin);
    for (std::int64_t next = run.begin; !engine.step_is_due(); ++next) {
      EXPECT_EQ(engine.microbatch(), next);
      const at::Tensor tokens = batch.tokens.narrow(0, next * rows, rows);
      std::this_thread::sleep_for(std::chrono::milliseconds(mesh.rank() == 1 ? 40 : 4));
      engine.backward(model->forward(tokens, batch.targets.narrow(0, next * rows, rows)),
                      {.tokens = tokens.numel(), .samples = rows});
    }
    trained.steps.push_back(engine.step());
    EXPECT_EQ(trained.steps.back().planned, trained.steps.back().allocated);
  }
  const Gathered gathered(engine);
  trained.values = values_of(*model);
  return trained;
}

TEST(ReproducibleDeal, MicrobatchesDealtBySpeedGiveTheBitsOfOneRank) {
  const GradientSync last = GradientSync::kLastMicrobatch;
  const Placed placed[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardGradients,
                           Placed(ShardingStrategy::kFullShard, /*shared=*/true)};
  std::vector<std::int64_t> alone;
  Trained wanted;
  Strategy one = reproducible(ShardingStrategy::kFullShard, DType::kF32, kRules[0], last);
  one.gradient_accumulation = 12;
  run_ranks({}, [&](const Mesh& mesh) { wanted = train_dealt(mesh, one, alone); });
  for (const Placed& place : placed) {
    Strategy strategy = reproducible(place, DType::kF32, kRules[0], last);
    strategy.gradient_accumulation = 6;
    strategy.deal = {.by = DealBy::kSpeed, .window = 1};
    std::array<std::vector<std::int64_t>, 2> counts;
    std::array<Trained, 2> trained;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const auto rank = static_cast<std::size_t>(mesh.rank());
      trained[rank] = train_dealt(mesh, strategy, counts[rank]);
    });
    for (std::size_t rank = 0; rank < 2; ++rank) expect_same_bits(trained[rank], wanted, name_of(place));
    EXPECT_EQ(counts[0][0], 6) << "even at first";
    EXPECT_GT(counts[0].back(), counts[1].back()) << "rank 1 is slow";
    for (std::size_t step = 0; step < 4; ++step) EXPECT_EQ(counts[0][step] + counts[1][step], 12);
  }
}

// If "reproducible" is off, the deal of microbatches decides the order of additions, and so the rounding of losses.
TEST(ReproducibleDeal, WithoutReproducibleDealtMicrobatchesGiveTheSameLosses) {
  Strategy even = tiny_strategy(ShardingStrategy::kShardGradients);
  even.gradient_accumulation = 6;
  even.gradient_sync = GradientSync::kLastMicrobatch;
  even.deal = {.by = DealBy::kSpeed, .window = 1000};  // microbatches are never dealt again
  Strategy dealt = even;
  dealt.deal.window = 1;
  std::array<Trained, 2> trained;
  std::array<std::array<std::vector<std::int64_t>, 2>, 2> counts;
  for (const std::size_t i : {0, 1}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Trained own = train_dealt(mesh, i == 0 ? even : dealt, counts[i][static_cast<std::size_t>(mesh.rank())]);
      if (mesh.rank() == 0) trained[i] = std::move(own);
    });
  }
  EXPECT_EQ(counts[0][1].back(), 6);
  EXPECT_LT(counts[1][1].back(), 6);
  for (std::size_t step = 0; step < 4; ++step)
    EXPECT_NEAR(trained[1].steps[step].loss, trained[0].steps[step].loss, 1e-4) << step;
}

/// Trains Tiny as train_dealt does, with ranks that also compute microbatches of slower ranks. `wait` is called before
/// each backward, with the step, the number of microbatches that this rank has begun in it, and the loss. `begun` gets
/// the number of microbatches begun in each step.
template <class Wait>
Trained train_backed_up(const Mesh& mesh, const Strategy& strategy, std::vector<std::int64_t>& begun,
                        const Wait& wait) {
  at::set_num_threads(1);
  const TinyOptions options;
  Tiny model = make_tiny(options, /*deferred=*/true);
  Engine engine(model.ptr(), strategy, mesh);
  Trained trained;
  const std::int64_t even = strategy.gradient_accumulation * mesh.world_size();
  const std::int64_t rows = kBatch / (strategy.deal.microbatches > 0 ? strategy.deal.microbatches : even);
  for (const Batch& batch : make_batches(kSteps, kBatch, kLength, options.vocab)) {
    std::int64_t count = 0;
    while (!engine.step_is_due()) {
      const std::int64_t begin = engine.microbatch() * rows;
      const at::Tensor tokens = batch.tokens.narrow(0, begin, rows);
      const at::Tensor loss = model->forward(tokens, batch.targets.narrow(0, begin, rows));
      wait(static_cast<std::int64_t>(begun.size()), ++count, loss);
      engine.backward(loss, {.tokens = tokens.numel(), .samples = rows});
    }
    begun.push_back(count);
    trained.steps.push_back(engine.step());
    EXPECT_EQ(trained.steps.back().planned, trained.steps.back().allocated);
  }
  const Gathered gathered(engine);
  trained.values = values_of(*model);
  return trained;
}

Strategy backed_up(const Placed& placed, const Rule& rule, std::int64_t each, std::int64_t backups) {
  Strategy strategy = reproducible(placed, DType::kF32, rule, GradientSync::kLastMicrobatch);
  strategy.gradient_accumulation = each;
  strategy.deal = {.by = DealBy::kSpeed, .window = 1000, .backups = backups};  // ranks keep equally many microbatches
  return strategy;
}

/// Returns the result of a single rank that trains on the same microbatches.
Trained alone(const Rule& rule, std::int64_t all) {
  return train({}, reproducible(ShardingStrategy::kFullShard, DType::kF32, rule, GradientSync::kLastMicrobatch), {},
               all);
}

void wait_until_at_least(const std::atomic<std::int64_t>& value, std::int64_t wanted) {
  while (value.load() < wanted) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// Rank 1 waits in the first microbatch of each step until rank 0 is about to end the last microbatch that it may make
// for rank 1.
TEST(ReproducibleBackups, ARankThatStandsStillIsOvertakenToTheBitsOfOneRank) {
  struct Case {
    Placed placed;
    Rule rule;
    int hosts = 1;
  };
  const Case cases[] = {{ShardingStrategy::kNoShard, kRules[0]},
                        {ShardingStrategy::kShardGradients, kRules[1]},
                        {Placed(ShardingStrategy::kFullShard, /*shared=*/true), kRules[0]},
                        {ShardingStrategy::kNoShard, kRules[0], 2},
                        {ShardingStrategy::kShardGradients, kRules[0], 2}};
  for (const Case& each : cases) {
    const Placed& placed = each.placed;
    const Rule& rule = each.rule;
    const Trained wanted = alone(rule, 8);
    for (const std::int64_t backups : {2, 4}) {
      std::atomic<std::int64_t> last = 0;  // the step whose last microbatch rank 0 has begun, counted from 1
      std::array<std::vector<std::int64_t>, 2> begun;
      std::array<Trained, 2> trained;
      run_ranks({.ranks = 2, .hosts = each.hosts}, [&](const Mesh& mesh) {
        const auto rank = static_cast<std::size_t>(mesh.rank());
        trained[rank] = train_backed_up(mesh, backed_up(placed, rule, 4, backups), begun[rank],
                                        [&](std::int64_t step, std::int64_t count, const at::Tensor&) {
                                          if (rank == 0 && count == 4 + backups) last = step + 1;
                                          if (rank == 1 && count == 1) wait_until_at_least(last, step + 1);
                                        });
      });
      for (std::size_t rank = 0; rank < 2; ++rank) expect_same_bits(trained[rank], wanted, name_of(placed));
      for (std::size_t step = 0; step < kSteps; ++step) {
        EXPECT_GE(trained[0].steps[step].made_again, backups - 1) << "the last one may be a tie";
        EXPECT_LE(trained[0].steps[step].made_again, backups);
        EXPECT_EQ(begun[0][step], 4 + backups) << "its own, and as many of the slow rank's as it may take";
        EXPECT_LE(begun[1][step], backups == 4 ? 1 : 3) << "the others were made, or about to be";
      }
    }
  }
}

// Rank 0 waits in the first microbatch that it makes for rank 1, until rank 1 has made that microbatch. It waits either
// before the backward, which is then left out, or within the backward, whose result is then dropped.
TEST(ReproducibleBackups, AResultThatComesSecondChangesNoBit) {
  const Trained wanted = alone(kRules[0], 4);
  for (const bool within : {false, true}) {
    std::atomic<std::int64_t> claimed = 0, reached = 0;  // steps, counted from 1
    std::array<Trained, 2> trained;
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const auto rank = static_cast<std::size_t>(mesh.rank());
      const auto stand_still = [&](std::int64_t step) {
        claimed = step + 1;
        wait_until_at_least(reached, step + 1);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      };
      const auto wait = [&](std::int64_t step, std::int64_t count, const at::Tensor& loss) {
        if (rank == 0 && count == 3 && !within) stand_still(step);
        if (rank == 0 && count == 3 && within)
          loss.register_hook([stand_still, step](const at::Tensor&) { stand_still(step); });
        if (rank == 1 && count == 1) wait_until_at_least(claimed, step + 1);
        if (rank == 1 && count == 2) reached = step + 1;
      };
      std::vector<std::int64_t> begun;
      trained[rank] = train_backed_up(mesh, backed_up(ShardingStrategy::kShardOptimizer, kRules[0], 2, 1), begun, wait);
    });
    for (std::size_t rank = 0; rank < 2; ++rank) expect_same_bits(trained[rank], wanted, std::to_string(within));
  }
}

// Ranks 1 and 2 wait until rank 0 has made one microbatch of rank 2 and both microbatches of rank 1. Rank 1 then has no
// sum to send.
TEST(ReproducibleBackups, ARankWhoseWholeRunAnotherMadeChangesNoBit) {
  const Trained wanted = alone(kRules[0], 6);
  for (const ShardingStrategy placed : {ShardingStrategy::kNoShard, ShardingStrategy::kShardGradients}) {
    std::atomic<std::int64_t> last = 0;  // the step whose last microbatch rank 0 has begun, counted from 1
    std::array<std::vector<std::int64_t>, 3> begun;
    std::array<Trained, 3> trained;
    run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
      const auto rank = static_cast<std::size_t>(mesh.rank());
      const auto wait = [&](std::int64_t step, std::int64_t count, const at::Tensor&) {
        if (rank == 0 && count == 6) last = step + 1;
        if (rank > 0) wait_until_at_least(last, step + 1);
      };
      trained[rank] = train_backed_up(mesh, backed_up(placed, kRules[0], 2, 4), begun[rank], wait);
    });
    for (std::size_t rank = 0; rank < 3; ++rank) expect_same_bits(trained[rank], wanted, std::to_string(rank));
    for (std::size_t step = 0; step < kSteps; ++step) {
      EXPECT_EQ(begun[1][step], 1) << "its first one was made before its backward, and nothing else is left";
      EXPECT_GE(trained[1].steps[step].made_again, 3) << "the last one of rank 2 may be a tie";
    }
  }
}

TEST(ReproducibleBackups, ThreeRanksThatHelpEachOtherGiveTheBitsOfOne) {
  const Trained wanted = alone(kRules[0], 12);
  Strategy strategy = backed_up(ShardingStrategy::kShardGradients, kRules[0], 4, 3);
  strategy.deal.window = 1;
  for (const int hosts : {1, 3}) {
    std::array<std::vector<std::int64_t>, 3> begun;
    std::array<Trained, 3> trained;
    run_ranks({.ranks = 3, .hosts = hosts}, [&](const Mesh& mesh) {
      const auto rank = static_cast<std::size_t>(mesh.rank());
      trained[rank] =
          train_backed_up(mesh, strategy, begun[rank], [&](std::int64_t step, std::int64_t, const at::Tensor&) {
            const bool is_slow = static_cast<std::int64_t>(rank) == step % 3;  // the ranks are slow in turn
            std::this_thread::sleep_for(std::chrono::milliseconds(is_slow ? 20 : 1));
          });
    });
    for (std::size_t rank = 0; rank < 3; ++rank) expect_same_bits(trained[rank], wanted, std::to_string(rank));
    for (std::size_t step = 0; step < kSteps; ++step) EXPECT_GE(begun[0][step] + begun[1][step] + begun[2][step], 12);
  }
}

TEST(ReproducibleDeal, MicrobatchesThatTheRanksDoNotDivideGiveTheBitsOfOneRank) {
  const Trained wanted = alone(kRules[0], 8);
  for (const std::int64_t backups : {0, 1}) {
    Strategy strategy = backed_up(ShardingStrategy::kShardGradients, kRules[0], 1, backups);
    strategy.deal.window = 1;
    strategy.deal.microbatches = 8;
    std::array<Trained, 3> trained;
    std::array<std::vector<std::int64_t>, 3> begun;
    const auto slow_first = [](const Mesh& mesh) {
      return [rank = mesh.rank()](std::int64_t, std::int64_t, const at::Tensor&) {
        std::this_thread::sleep_for(std::chrono::milliseconds(rank == 0 ? 10 : 1));
      };
    };
    run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
      const auto rank = static_cast<std::size_t>(mesh.rank());
      trained[rank] = train_backed_up(mesh, strategy, begun[rank], slow_first(mesh));
    });
    for (std::size_t rank = 0; rank < 3; ++rank) expect_same_bits(trained[rank], wanted, std::to_string(rank));
    if (backups == 0) {
      EXPECT_EQ(begun[0][0] + begun[1][0] + begun[2][0], 8);
    }
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      std::vector<std::int64_t> counts;
      const auto at_once = [](std::int64_t, std::int64_t, const at::Tensor&) {};
      expect_same_bits(train_backed_up(mesh, strategy, counts, at_once), wanted, "one rank");
      EXPECT_EQ(counts, std::vector<std::int64_t>(kSteps, 8)) << "nobody else makes them";
    });
    strategy.reproducible = false;
    strategy.deal.backups = 0;
    run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
      std::vector<std::int64_t> counts;
      const Trained other = train_backed_up(mesh, strategy, counts, slow_first(mesh));
      for (std::size_t step = 0; step < kSteps; ++step)
        EXPECT_NEAR(other.steps[step].loss, wanted.steps[step].loss, 1e-4) << step;
    });
  }
}

/// Returns the error with which an Engine on this number of ranks ends.
std::string refusal(const ThreadRanks& ranks, const Strategy& strategy) {
  return error_of([&] {
    run_ranks(ranks, [&](const Mesh& mesh) {
      Tiny model = make_tiny({}, /*deferred=*/false);
      const Engine engine(model.ptr(), strategy, mesh);
    });
  });
}

TEST(Reproducible, RanksThatWouldCutSubtreesAreRefusedWithWhatWorks) {
  Strategy strategy = reproducible(ShardingStrategy::kFullShard, DType::kF32, kRules[0], GradientSync::kEachMicrobatch);
  strategy.gradient_accumulation = 4;
  const std::string each = refusal({.ranks = 3}, strategy);
  EXPECT_NE(each.find("got 4 microbatches a step on each of 3 ranks"), std::string::npos) << each;
  EXPECT_NE(each.find("take \"gradient_sync\": \"last_microbatch\""), std::string::npos) << each;
  strategy.gradient_sync = GradientSync::kLastMicrobatch;
  EXPECT_EQ(refusal({.ranks = 3}, strategy), "");
  strategy.gradient_accumulation = 3;
  EXPECT_EQ(refusal({.ranks = 2}, strategy), "");
  strategy.compression.gradients = WireForm::kLossless;
  const std::string packed = refusal({.ranks = 2}, strategy);
  EXPECT_NE(packed.find("ranks send the sums of several subtrees instead"), std::string::npos) << packed;
  strategy.compression = {};
  strategy.strategy = ShardingStrategy::kHybridShard;
  strategy.gradient_sync = GradientSync::kEachMicrobatch;
  strategy.gradient_accumulation = 1;
  const std::string replicas = refusal({.ranks = 6, .hosts = 2}, strategy);
  EXPECT_NE(replicas.find("a replica has a power of two of ranks, got 3"), std::string::npos) << replicas;
  strategy.strategy = ShardingStrategy::kFullShard;
  const std::string hosts = refusal({.ranks = 6, .hosts = 2}, strategy);
  EXPECT_NE(hosts.find("a host has a power of two of ranks, got 3"), std::string::npos) << hosts;
}

TEST(Reproducible, ReductionsAheadAreSaidToHaveNoEffectOnSumsOfSubtrees) {
  const GradientSync last = GradientSync::kLastMicrobatch;
  Strategy strategy = reproducible(ShardingStrategy::kShardGradients, DType::kF32, kRules[0], last);
  strategy.reductions_ahead = 2;
  for (const std::int64_t microbatches : {3, 4}) {
    strategy.gradient_accumulation = microbatches;
    const std::string said = stderr_of([&] {
      set_log_level(LogLevel::kInfo);
      EXPECT_EQ(refusal({.ranks = 2}, strategy), "");
    });
    const bool has_no_effect = said.find("\"reductions_ahead\" has no effect here") != std::string::npos;
    EXPECT_EQ(has_no_effect, microbatches == 3) << said;
  }
}

TEST(ReproducibleDeal, PrivateParametersThatAreGatheredAreRefused) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kFullShard);
  strategy.gradient_sync = GradientSync::kLastMicrobatch;
  strategy.gradient_accumulation = 4;
  strategy.deal.by = DealBy::kSpeed;
  const std::string told = refusal({.ranks = 2}, strategy);
  EXPECT_NE(told.find("each microbatch gathers parameters of all ranks"), std::string::npos) << told;
  strategy.strategy = ShardingStrategy::kShardGradients;
  EXPECT_EQ(refusal({.ranks = 2}, strategy), "");
  strategy.gradient_accumulation = 1;
  const std::string single = refusal({.ranks = 2}, strategy);
  EXPECT_NE(single.find("one microbatch a rank leaves nothing to deal"), std::string::npos) << single;
  strategy.deal.microbatches = 7;
  strategy.deal.longest = 3;
  const std::string short_runs = refusal({.ranks = 2}, strategy);
  EXPECT_NE(short_runs.find("some ranks have 4 microbatches at first"), std::string::npos) << short_runs;
}

/// Returns the error with which two ranks end if they call `what` under "deal.backups".
template <class What>
std::string refusal_of_backups(const What& what) {
  return error_of([&] {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const TinyOptions options;
      Tiny model = make_tiny(options, /*deferred=*/false);
      Engine engine(model.ptr(), backed_up(ShardingStrategy::kShardGradients, kRules[0], 2, 1), mesh);
      const Batch batch = make_batches(1, 2, kLength, options.vocab)[0];
      what(engine, model->forward(batch.tokens, batch.targets));
    });
  });
}

TEST(ReproducibleBackups, WhatDoesNotGoWithThemIsRefusedByName) {
  const std::string gathers =
      refusal({.ranks = 4, .hosts = 2}, backed_up(ShardingStrategy::kFullShard, kRules[0], 2, 1));
  EXPECT_NE(gathers.find("/deal/by: speed gives ranks different numbers of microbatches"), std::string::npos)
      << gathers;
  for (const int hosts : {1, 2})
    EXPECT_EQ(refusal({.ranks = 4, .hosts = hosts}, backed_up(ShardingStrategy::kNoShard, kRules[0], 2, 1)), "");
  const std::string unasked = refusal_of_backups([](Engine& engine, const at::Tensor& loss) { engine.backward(loss); });
  EXPECT_NE(unasked.find("the program has not asked which microbatch of the step this is"), std::string::npos)
      << unasked;
  const std::string twice = refusal_of_backups([](Engine& engine, const at::Tensor& loss) {
    engine.microbatch();
    engine.backward(loss, {.retain_graph = true});
  });
  EXPECT_NE(twice.find("backward with retain_graph under deal.backups"), std::string::npos) << twice;
  const std::string nothing = refusal_of_backups([](Engine& engine, const at::Tensor&) { engine.backward_nothing(); });
  EXPECT_NE(nothing.find("each microbatch of the step has data there"), std::string::npos) << nothing;
  const std::string dropped = refusal_of_backups([](Engine& engine, const at::Tensor& loss) {
    engine.microbatch();
    engine.backward(loss);
    engine.zero_grad();
  });
  EXPECT_NE(dropped.find("zero_grad between backward and step under deal.backups"), std::string::npos) << dropped;
}

TEST(Reproducible, RunningStatisticsAreRefusedByName) {
  struct Normed : torch::nn::Module {
    Normed() : norm(register_module("norm", torch::nn::BatchNorm1d(4))) {}
    torch::nn::BatchNorm1d norm;
  };
  const auto told = [](bool trains) {
    std::string text;
    run_ranks({}, [&](const Mesh& mesh) {
      auto model = std::make_shared<Normed>();
      model->train(trains);
      Strategy strategy;
      strategy.reproducible = true;
      text = error_of([&] { const Engine engine(model, strategy, mesh); });
    });
    return text;
  };
  EXPECT_NE(told(true).find("module norm keeps running statistics"), std::string::npos) << told(true);
  EXPECT_EQ(told(false), "");
}

}  // namespace reproducible_test
}  // namespace tessera::testing
