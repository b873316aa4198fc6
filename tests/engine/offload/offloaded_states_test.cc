// Tests offloading masters and optimizer states to disk. Training gives the same bits as a run without offloading, and
// memory and traffic are as planned. Changes that a program makes around a step (it writes parameters, freezes them,
// ends the Engine) reach the disk too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>

#include "tessera/error.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"

namespace tessera::testing {
namespace offloaded_states_test {

using ::testing::HasSubstr;

constexpr Below kBelow[] = {{0, 1, 1, 4096, 0, 1},       // all state, in as many records as possible
                            {0, 1, 1, 16384, 20000, 2},  // a part of the records is cached
                            {0, 0.5, 0.3, 4096, 0, 3},   // some records have masters, and other records have none
                            {0, 0, 1, 4 << 20, 0, 4}};   // each group has one record

TEST(Offload, TrainingHasTheBitsOfARunInMemory) {
  const std::pair<const char*, TinyOptions> models[] = {{"wide", kWide}, {"awkward", kAwkward}};
  MadeOnce<Trained> in_memory;
  for (const auto& [kept, model, ranks, placed, below] :
       pairwise_of(sampled_kept(), models, std::array{1, 2, 3}, kInMemory, kBelow)) {
    const TrainOptions options{.model = model.second, .steps = 5};
    const ThreadRanks joined{.ranks = ranks};
    const Strategy plain = strategy_of(kept, placed), offloaded = strategy_of(kept, placed, &below);
    const std::string of =
        name_of(kept) + ", " + name_of(placed) + ", " + model.first + " on " + std::to_string(ranks) + " ranks";
    const std::string what = of + ", records of " + std::to_string(below.record_bytes);
    const Trained& wanted = in_memory(of, [&] { return train_on_threads(joined, plain, options); });
    const Trained trained = train_on_threads(joined, offloaded, options);
    expect_same_bits(trained, wanted, what);
    for (const StepResult& step : trained.steps) EXPECT_EQ(step.planned, step.allocated) << what;
  }
}

TEST(Offload, AccumulationAndOverflowsKeepTheBits) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    const auto train = [&](bool offloads) {
      return train_on_threads({.ranks = 2},
                              strategy_for(
                                  ShardingStrategy::kFullShard,
                                  [&](Strategy& s) {
                                    s.gradient_accumulation = 2;
                                    s.mixed_precision.loss_scale.initial = 4294967296.0;  // the first steps overflow
                                    if (offloads) put_below(s, kBelow[0]);
                                  },
                                  dtype),
                              {.model = kWide, .steps = 24});
    };
    const Trained wanted = train(false);
    EXPECT_EQ(wanted.steps.front().overflow, dtype == DType::kF16);
    EXPECT_FALSE(wanted.steps.back().overflow);
    expect_same_bits(train(true), wanted, std::string(tessera::name_of(dtype)));
  }
}

TEST(Offload, AutoFitsTheLimitAndKeepsTheBits) {
  const Kept kept{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32};
  const TrainOptions options{.model = kWide, .steps = 5};
  const Trained wanted = train_on_threads({.ranks = 2}, strategy_of(kept, ShardingStrategy::kFullShard), options);
  const std::int64_t all = wanted.steps[0].planned.total();
  for (const double share : {1.0, 0.9, 0.7}) {
    Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard, &kBelow[0]);
    strategy.offload.masters.tier = strategy.offload.moments.tier = Tier::kAuto;
    strategy.memory.limit_bytes = static_cast<std::int64_t>(share * static_cast<double>(all));
    const Trained trained = train_on_threads({.ranks = 2}, strategy, options);
    expect_same_bits(trained, wanted, std::to_string(share));
    EXPECT_LE(trained.steps[0].planned.total(), strategy.memory.limit_bytes);
    EXPECT_EQ(trained.traffic.disk_bytes_written > 0, share < 1.0) << share;
  }
}

TEST(Offload, BytesMovedEqualThePlan) {
  for (const Kept& kept : sampled_kept()) {
    for (const Below& below : kBelow) {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_of(kept, ShardingStrategy::kFullShard, &below), kWide);
        expect_planned_disk_traffic(session, name_of(kept) + ", records of " + std::to_string(below.record_bytes));
      });
    }
  }
}

TEST(Offload, WritesUnderGatheredReachOffloadedMasters) {
  for (const Kept& kept : sampled_kept()) {
    FirstValues first;
    for (const Below* below : {static_cast<const Below*>(nullptr), &kBelow[0]}) {
      on_each_placement(
          2,
          [&](const Mesh& mesh, const Strategy& strategy) {
            EXPECT_TRUE(first.same_bits(mesh, written_under_gathered(mesh, strategy))) << name_of(kept);
          },
          adjusted_to(kept, below), kept.param);
    }
  }
}

TEST(Offload, NextEngineTakesMastersFromTheDisk) {
  for (const Kept& kept : sampled_kept()) {
    FirstValues first;
    for (const Below* below : {static_cast<const Below*>(nullptr), &kBelow[0], &kBelow[2]}) {
      for (const Placed& placed : kInMemory) {
        run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
          EXPECT_TRUE(first.same_bits(mesh, trained_by_two_engines(mesh, strategy_of(kept, placed, below))))
              << name_of(kept) << ", " << name_of(placed);
        });
      }
    }
  }
}

TEST(Offload, StatesAreCarriedWhenFreezingChanges) {
  for (const Kept& kept : sampled_kept()) {
    FirstValues first;
    for (const Below* below : {static_cast<const Below*>(nullptr), &kBelow[2]}) {
      on_each_placement(
          2,
          [&](const Mesh& mesh, const Strategy& strategy) {
            EXPECT_TRUE(first.same_bits(mesh, trained_with_weights_frozen_for_a_while(mesh, strategy)))
                << name_of(kept);
          },
          adjusted_to(kept, below), kept.param);
    }
  }
}

std::string refusal_of(const std::string& path) {
  return error_of([&] {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_of(kKept[0], ShardingStrategy::kFullShard, &kBelow[0]);
      strategy.offload.paths = {path};
      Session session(mesh, strategy, kWide);
    });
  });
}

TEST(Offload, UnusableDirectoryIsRefusedBeforeTraining) {
  EXPECT_THAT(refusal_of("/nowhere/at/all"), HasSubstr("/nowhere/at/all"));
  EXPECT_THAT(refusal_of("/proc/version"), HasSubstr("/proc/version"));
}

}  // namespace offloaded_states_test
}  // namespace tessera::testing
