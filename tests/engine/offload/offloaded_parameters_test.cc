// Tests offloading parameters to disk. Training gives the same bits as a run with all parameters in memory, whether
// each rank gathers units for itself or the ranks of a host share slots. Memory and traffic are as planned, and changes
// that a program makes around a step reach the disk too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "tessera/error.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"

namespace tessera::testing {
namespace offloaded_parameters_test {

using ::testing::HasSubstr;

constexpr Below kBelow[] = {{1, 0, 0, 4096, 0, 1},      // only parameters, in as many records as possible
                            {1, 1, 1, 4096, 0, 2},      // everything
                            {0.5, 0.3, 1, 8192, 0, 3},  // a part of each shard is in memory
                            {1, 1, 1, 8192, 60000, 2},  // some of the parameters are cached
                            {1, 1, 1, 4 << 20, 0, 4}};  // each group has one record

const Placed kPlaced[] = {ShardingStrategy::kFullShard, Placed(ShardingStrategy::kFullShard, /*shared=*/true)};

std::string name_of(const Kept& kept, const Placed& placed, int ranks) {
  return name_of(kept) + ", " + name_of(placed) + " on " + std::to_string(ranks) + " ranks";
}

std::string name_of(const Below& below) { return "records of " + std::to_string(below.record_bytes); }

std::string name_of(const Kept& kept, const Placed& placed, int ranks, const Below& below) {
  return name_of(kept, placed, ranks) + ", " + name_of(below);
}

TEST(OffloadedParameters, TrainingHasTheBitsOfARunInMemory) {
  const std::pair<int, TinyOptions> kRuns[] = {{1, kWide}, {2, kWide}, {3, kWide}, {2, kAwkward}};
  MadeOnce<Trained> in_memory;
  for (const auto& [kept, run, placed, below] : pairwise_of(sampled_kept(), kRuns, kPlaced, kBelow)) {
    const auto& [ranks, model] = run;
    const TrainOptions options{.model = model, .steps = 5};
    const auto train = [&, of = ThreadRanks{.ranks = ranks}](const Strategy& strategy) {
      return train_on_threads(of, strategy, options);
    };
    const Strategy without = strategy_of(kept, placed);
    const std::string of = name_of(kept, placed, ranks) + (model.unused_block ? ", awkward" : "");
    const std::string what = of + ", " + name_of(below);
    const Trained& wanted = in_memory(of, [&] { return train(without); });
    const Trained trained = train(strategy_of(kept, placed, &below));
    expect_same_bits(trained, wanted, what);
    for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << what;
  }
}

TEST(OffloadedParameters, ReplicasHaveTheBitsOfARunInMemory) {
  for (const Kept& kept : sampled_kept()) {
    for (const bool shared : {false, true}) {
      const auto train = [&](const Below* below) {
        Strategy strategy = strategy_of(kept, Placed(ShardingStrategy::kHybridShard, shared), below);
        strategy.mesh.replicate = 2;
        return train_on_threads({.ranks = 4}, strategy, {.model = kAwkward, .steps = 4});
      };
      expect_same_bits(train(&kBelow[1]), train(nullptr), name_of(kept) + (shared ? ", shared" : ""));
    }
  }
}

TEST(OffloadedParameters, PrefetchAccumulationAndOverflowsKeepTheBits) {
  constexpr std::int64_t kPrefetches[] = {0, 1, 3};
  for (const auto& each : pairwise_of(std::array{DType::kF32, DType::kF16}, kPlaced, kPrefetches)) {
    const auto& [dtype, placed, prefetch] = each;
    const auto train = [&](bool offloads) {
      Strategy strategy = strategy_for(std::get<1>(each), nullptr, std::get<0>(each));
      strategy.prefetch = std::get<2>(each);
      strategy.gradient_accumulation = 2;
      strategy.mixed_precision.loss_scale.initial = 4294967296.0;  // with this scale, the first steps overflow
      if (offloads) put_below(strategy, kBelow[1]);
      return train_on_threads({.ranks = 2}, strategy, {.model = kWide, .steps = 24});
    };
    const Trained wanted = train(false);
    EXPECT_EQ(wanted.steps.front().overflow, dtype == DType::kF16);
    expect_same_bits(train(true), wanted, name_of(placed) + ", prefetch " + std::to_string(prefetch));
  }
}

TEST(OffloadedParameters, UpdatesInBackwardHaveTheBitsOfARunInMemory) {
  const auto exists = [](const Kept& kept, const Placed&, int, const Below&) {
    return kept.param != DType::kF16;  // refused
  };
  MadeOnce<Trained> in_memory;
  for (const auto& [kept, placed, ranks, below] :
       pairwise_where(exists, sampled_kept(), kPlaced, std::array{1, 2}, kBelow)) {
    const auto train = [of = ThreadRanks{.ranks = ranks}](Strategy strategy) {
      update_in_backward(strategy);
      return train_on_threads(of, strategy, {.model = kWide, .steps = 5});
    };
    const Strategy without = strategy_of(kept, placed);
    const Trained& wanted = in_memory(name_of(kept, placed, ranks), [&] { return train(without); });
    expect_same_bits(train(strategy_of(kept, placed, &below)), wanted, name_of(kept, placed, ranks, below));
  }
}

TEST(OffloadedParameters, AutoFitsTheLimitAndKeepsTheBits) {
  const Kept kept{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32};
  const TrainOptions options{.model = kWide, .steps = 5};
  const Trained wanted = train_on_threads({.ranks = 2}, strategy_of(kept, ShardingStrategy::kFullShard), options);
  Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard, &kBelow[0]);
  const auto planned = [&](double parameters) {
    Below below = kBelow[0];
    below.parameters = parameters, below.masters = below.moments = 1;
    put_below(strategy, below);
    return train_on_threads({.ranks = 2}, strategy, options).steps[0].planned.total();
  };
  const std::int64_t most = planned(0.1), least = planned(1);
  ASSERT_LT(least, most);
  OffloadConfig& offload = strategy.offload;
  offload.parameters.tier = offload.masters.tier = offload.moments.tier = Tier::kAuto;
  for (const double share : {0.0, 0.5, 1.0}) {
    strategy.memory.limit_bytes = least + static_cast<std::int64_t>(share * static_cast<double>(most - least));
    const Trained trained = train_on_threads({.ranks = 2}, strategy, options);
    expect_same_bits(trained, wanted, std::to_string(share));
    EXPECT_LE(trained.steps[0].planned.total(), strategy.memory.limit_bytes);
    EXPECT_GT(trained.traffic.disk_bytes_read, 0);
  }
}

TEST(OffloadedParameters, BytesMovedEqualThePlan) {
  for (const auto& [kept, below, placed, ranks, in_backward] : pairwise_of(
           std::array{kKept[0], kKept[2], kKept[4]}, kBelow, kPlaced, std::array{1, 2}, std::array{false, true})) {
    Strategy strategy = strategy_of(kept, placed, &below);
    if (in_backward) update_in_backward(strategy);
    const std::string what = name_of(kept, placed, ranks, below) + (in_backward ? ", in backward" : "");
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy, {.vocab = 32, .width = 32, .hidden = 64, .blocks = 5});
      expect_planned_disk_traffic(session, what);
    });
  }
}

// Parameters that train get the cache first. The cache holds a part of them, or all of them and some frozen ones. The
// last of two ranks has records that hold only padding. If the unit of these records is frozen, only set-up writes
// them.
TEST(OffloadedParameters, BytesMovedEqualThePlanWithFrozenAndCachedOnes) {
  constexpr std::int64_t kCaches[] = {0, 30000, 90000};
  const std::string kFrozen[] = {"blocks.0.*", "blocks.2.*"};
  for (const auto& [cache_bytes, placed, ranks, pattern] :
       pairwise_of(kCaches, kPlaced, std::array{1, 2, 3}, kFrozen)) {
    const std::string& frozen = pattern;
    const Below below = {1, 1, 1, 8192, cache_bytes, 2};
    const Strategy strategy = strategy_of(kKept[0], placed, &below);
    const std::string what = name_of(kKept[0], placed, ranks, below) + ", " + frozen;
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy, {.vocab = 32, .width = 32, .hidden = 64, .blocks = 5});
      session.engine.set_trainable(frozen, false);
      expect_planned_disk_traffic(session, what);
    });
  }
}

/// Checks that `body` leaves the same values as with all state in memory, under each placement, on 1 and 2 ranks.
template <class Body>
void expect_values_as_in_memory(std::span<const Kept> all, const Body& body) {
  const auto values = [&](int ranks, const Strategy& strategy) {
    return of_rank_zero({.ranks = ranks}, [&](const Mesh& mesh) { return body(mesh, strategy); });
  };
  MadeOnce<Values> in_memory;
  for (const auto& [kept, placed, ranks, below] :
       pairwise_of(all, kPlaced, std::array{1, 2}, std::array{kBelow[1], kBelow[2]})) {
    const int of = ranks;
    const Strategy without = strategy_of(kept, placed);
    const Values& wanted = in_memory(name_of(kept, placed, ranks), [&] { return values(of, without); });
    EXPECT_TRUE(all_same_bits(values(ranks, strategy_of(kept, placed, &below)), wanted))
        << name_of(kept, placed, ranks, below);
  }
}

TEST(OffloadedParameters, WritesUnderGatheredReachTheDisk) {
  expect_values_as_in_memory(sampled_kept(), written_under_gathered);
}

TEST(OffloadedParameters, NextEngineTakesThemFromTheDisk) {
  expect_values_as_in_memory(sampled_kept(), trained_by_two_engines);
}

TEST(OffloadedParameters, FreezingKeepsTheirValues) {
  expect_values_as_in_memory(sampled_kept(), trained_with_weights_frozen_for_a_while);
}

// Evaluation gathers in other orders, and some of its gathers are still under way when a step begins.
TEST(OffloadedParameters, ForwardWithoutBackwardChangesNothing) {
  expect_values_as_in_memory({&kKept[2], 1}, [](const Mesh& mesh, Strategy strategy) {
    strategy.prefetch = 2;
    Session session(mesh, strategy, {.vocab = 32, .width = 32, .hidden = 64, .blocks = 6});
    for (std::size_t i = 0; i < 6; ++i) {
      session.engine.backward(session.loss(i));
      {
        const torch::NoGradGuard no_grad;
        session.loss(i + 1);
      }
      session.engine.step();
      if (i % 2 == 0) {
        const std::vector<std::size_t> batches = {i, i + 2};
        session.engine.evaluate(batches, [&](std::size_t batch) { return session.loss(batch); });
      }
    }
    return session.values();
  });
}

// Parameters that lie partly on disk cannot be read after the Engine is gone, even on one rank.
TEST(OffloadedParameters, ReadingThemWithoutAnEngineSaysWhereTheyAre) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Tiny model = make_tiny(kWide, true);
    { const Engine engine(model.ptr(), strategy_of(kKept[0], ShardingStrategy::kFullShard, &kBelow[0]), mesh); }
    EXPECT_THAT(error_of([&] { model->parameters()[0].sum(); }), HasSubstr("put on disk by an Engine that is gone"));
  });
}

TEST(OffloadedParameters, StrategiesThatKeepParametersAreRefused) {
  for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                                      ShardingStrategy::kShardGradients, ShardingStrategy::kShardGradOp}) {
    const std::string error = error_of([&] {
      run_ranks({.ranks = 1},
                [&](const Mesh& mesh) { const Session session(mesh, strategy_of(kKept[0], kind, &kBelow[0]), kWide); });
    });
    EXPECT_THAT(error, HasSubstr("/offload/parameters/tier"));
    EXPECT_THAT(error, HasSubstr("FULL_SHARD"));
  }
}

}  // namespace offloaded_parameters_test
}  // namespace tessera::testing
