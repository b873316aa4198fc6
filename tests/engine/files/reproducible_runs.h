#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/checkpoint.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing::reproducible_test {

constexpr std::int64_t kSteps = 3, kBatch = 24, kLength = 5;

/// The data of a run of Tiny, and what happens in it.
struct RunOptions {
  std::int64_t all = 8;                  ///< microbatches of a step, on all ranks
  TinyOptions model = {};                ///< the model that is trained
  std::vector<double> weights = {1.0};   ///< the weights that microbatches get in turn
  std::int64_t overflows = -1;           ///< the microbatch of the second step whose gradients are too large for fp16
  int slow_rank = -1;                    ///< the rank that takes longer than others for each microbatch
  std::filesystem::path saves = {};      ///< folder for a checkpoint at the end; empty: none is saved
  std::function<void()> has_begun = {};  ///< called when the Engine is made
};

/// The results of a run.
struct TrainedStates : Trained {
  /// masters and optimizer states as the checkpoint has them, if one was saved
  std::map<std::string, std::string> states;
  std::vector<std::int64_t> counts;  ///< the microbatches that this rank computed, by step
};

/// Compares the results of two runs, and their masters and optimizer states too if `a` has them.
inline void expect_same_bits(const TrainedStates& a, const TrainedStates& b, const std::string& what) {
  testing::expect_same_bits(static_cast<const Trained&>(a), static_cast<const Trained&>(b), what);
  if (a.states.empty()) return;
  EXPECT_EQ(a.states.size(), b.states.size()) << what;
  for (const auto& [name, bytes] : a.states) {
    const auto other = b.states.find(name);
    EXPECT_TRUE(other != b.states.end() && other->second == bytes) << what << ", " << name;
  }
}

/// Trains Tiny on this rank with the microbatches that the Engine names.
inline TrainedStates train_microbatches(const Mesh& mesh, const Strategy& strategy, const RunOptions& run) {
  at::set_num_threads(1);
  Tiny model = make_tiny(run.model, /*deferred=*/true);
  Engine engine(model.ptr(), strategy, mesh);
  if (run.has_begun) run.has_begun();
  TrainedStates trained;
  const std::int64_t rows = kBatch / run.all;
  for (const Batch& batch : make_batches(tests_are_long() ? 30 : kSteps, kBatch, kLength, run.model.vocab)) {
    trained.counts.push_back(0);
    while (!engine.step_is_due()) {
      const std::int64_t index = engine.microbatch(), begin = index * rows;
      const at::Tensor tokens = batch.tokens.narrow(0, begin, rows), targets = batch.targets.narrow(0, begin, rows);
      if (run.slow_rank >= 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(mesh.rank() == run.slow_rank ? 8 : 1));
      at::Tensor loss = model->forward(tokens, targets);
      if (index == run.overflows && trained.steps.size() == 1) loss = loss * 1e30;
      const double weight = run.weights[static_cast<std::size_t>(index) % run.weights.size()];
      engine.backward(loss, {.tokens = tokens.numel(), .samples = rows, .weight = weight});
      ++trained.counts.back();
    }
    trained.steps.push_back(engine.step());
    EXPECT_EQ(trained.steps.back().planned, trained.steps.back().allocated);
  }
  trained.traffic = engine.traffic();
  if (!run.saves.empty()) trained.states = tensors_of(save_checkpoint(engine, run.saves));
  const Gathered gathered(engine);
  trained.values = values_of(*model);
  return trained;
}

/// Trains as train_microbatches does, on ranks that are threads. Checks that all ranks have the result of rank 0.
inline TrainedStates train(const ThreadRanks& ranks, Strategy strategy, const RunOptions& run) {
  strategy.gradient_accumulation = run.all / ranks.ranks;
  std::vector<TrainedStates> each(static_cast<std::size_t>(ranks.ranks));
  run_ranks(ranks, [&](const Mesh& mesh) {
    each[static_cast<std::size_t>(mesh.rank())] = train_microbatches(mesh, strategy, run);
  });
  for (std::size_t rank = 1; rank < each.size(); ++rank)
    expect_same_bits(each[rank], each[0], "rank " + std::to_string(rank));
  return each[0];
}
inline TrainedStates train(const ThreadRanks& ranks, const Strategy& strategy, const TinyOptions& model,
                           std::int64_t all) {
  return train(ranks, strategy, RunOptions{.all = all, .model = model});
}

/// An optimizer and the formats of its states.
struct Rule {
  const char* name;
  OptimizerType type;
  StateDType states = StateDType::kF32;
};

constexpr Rule kRules[] = {{"adamw", OptimizerType::kAdamW},
                           {"muon", OptimizerType::kMuon},
                           {"lamb", OptimizerType::kLamb},
                           {"8bit", OptimizerType::kAdamW, StateDType::k8Bit}};
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16};
constexpr GradientSync kBothSyncs[] = {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch};

inline Strategy reproducible(const Placed& placed, DType dtype, const Rule& rule, GradientSync sync) {
  Strategy strategy = tiny_strategy(placed, dtype);
  strategy.reproducible = true;
  strategy.gradient_sync = sync;
  strategy.gradient_clipping = 0.5;
  strategy.optimizer.type = rule.type;
  strategy.optimizer.state_dtype = rule.states;
  return strategy;
}

/// A number of ranks, the hosts on which they are, and the microbatches of a step.
struct World {
  int ranks, hosts;
  std::int64_t all;
};

inline std::string text_of(const World& world) {
  return std::to_string(world.ranks) + " ranks on " + std::to_string(world.hosts) + " hosts, " +
         std::to_string(world.all) + " microbatches";
}

inline bool goes(const World& world, GradientSync sync) {
  const auto is_power_of_two = [](std::int64_t number) { return (number & (number - 1)) == 0; };
  const std::int64_t each = world.all / world.ranks;
  return sync == GradientSync::kLastMicrobatch || each == 1 || is_power_of_two(world.ranks);
}

}  // namespace tessera::testing::reproducible_test
