// Tests sums of gradients that are offloaded to disk between their reduction and the update. Training gives the same
// bits as a run without offloading, and memory and traffic are as planned.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"

namespace tessera::testing {
namespace offloaded_gradients_test {

constexpr Below kGradientsBelow{0, 0, 0, 4096, 0, 1, true};
constexpr Below kAllBelow{0, 1, 1, 4096, 0, 2, true};
constexpr const Below* kBelow[] = {&kGradientsBelow, &kAllBelow};
/// A model whose shared block gets gradients after its reduction.
constexpr TinyOptions kLate{.vocab = 32, .width = 32, .hidden = 64, .shared_block = true, .recompute = true};

TEST(OffloadedGradients, TrainingHasTheBitsOfARunInMemory) {
  const std::pair<std::string, TinyOptions> models[] = {{"wide", kWide}, {"awkward", kAwkward}, {"late", kLate}};
  std::vector<std::size_t> placements(std::size(kOnePerPlacement));
  std::iota(placements.begin(), placements.end(), std::size_t{0});
  // The two entries of kBelow alternate, so that each number of ranks and each placement is tested with both.
  const auto exists = [](const Kept&, const auto&, std::size_t ranks, std::size_t place, const Below* below) {
    return below == kBelow[(ranks + place) % 2];
  };
  MadeOnce<Trained> in_memory;
  for (const auto& [kept, named, on, place, below] :
       pairwise_where(exists, sampled_kept(), models, std::array{1, 2, 3}, placements, kBelow)) {
    const Placed& placed = kOnePerPlacement[place];
    const ThreadRanks ranks{.ranks = on};
    const TinyOptions& model = named.second;
    const TrainOptions options{.model = model, .steps = 4};
    const std::string what =
        name_of(kept) + ", " + named.first + ", " + name_of(placed) + " on " + std::to_string(on) + " ranks";
    const Strategy without = strategy_of(kept, placed);
    const Trained& wanted = in_memory(what, [&] { return train_on_threads(ranks, without, options); });
    const Trained trained = train_on_threads(ranks, strategy_of(kept, placed, below), options);
    expect_same_bits(trained, wanted, what);
    // A first step that waits for a unit that is never used may need more memory than planned. The same holds for
    // gradients that come after their unit's reduction.
    for (std::size_t i = model.unused_block ? 1 : 0; i < trained.steps.size() && !model.recompute; ++i)
      EXPECT_EQ(trained.steps[i].planned, trained.steps[i].allocated) << what;
    // The gradients that stay in memory are those of the root unit.
    EXPECT_LT(trained.steps[0].planned[MemoryCategory::kGradients], wanted.steps[0].planned[MemoryCategory::kGradients])
        << what;
  }
}

// The runs here clip by norm, skip steps, and have several microbatches. None of these is possible with an update in
// backward.
TEST(OffloadedGradients, AccumulationAndOverflowsKeepTheBits) {
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    for (const int ranks : {1, 2}) {
      const auto train = [&](const Below* below) {
        return train_on_threads({.ranks = ranks},
                                strategy_for(
                                    ShardingStrategy::kFullShard,
                                    [&](Strategy& s) {
                                      s.gradient_accumulation = 3;
                                      s.mixed_precision.loss_scale.initial = 4294967296.0;  // the first steps overflow
                                      if (below) put_below(s, *below);
                                    },
                                    dtype),
                                {.model = kAwkward, .steps = 24, .batch = 18});
      };
      const Trained wanted = train(nullptr);
      EXPECT_EQ(wanted.steps.front().overflow, dtype == DType::kF16);
      EXPECT_FALSE(wanted.steps.back().overflow);
      for (const Below* below : kBelow)
        expect_same_bits(train(below), wanted, std::string(tessera::name_of(dtype)) + " on " + std::to_string(ranks));
    }
  }
}

TEST(OffloadedGradients, BytesMovedEqualThePlan) {
  for (const auto& [below, microbatches, ahead, ranks] :
       pairwise_of(kBelow, std::array{1, 2}, std::array{0, 1}, std::array{1, 2})) {
    Strategy strategy = strategy_of(kKept[2], ShardingStrategy::kFullShard, below);
    strategy.gradient_accumulation = microbatches;
    strategy.reductions_ahead = ahead;  // there are fewer slots than units
    TinyOptions deep = kWide;
    deep.blocks = 6;
    const std::string what = std::to_string(microbatches) + " microbatches on " + std::to_string(ranks) + " ranks";
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy, deep);
      expect_planned_disk_traffic(session, what);
    });
  }
}

// Programs make various calls between their steps.
TEST(OffloadedGradients, CallsAroundStepsKeepTheBits) {
  for (const auto& program :
       {written_under_gathered, trained_by_two_engines, trained_with_weights_frozen_for_a_while}) {
    FirstValues first;
    for (const Below* below : {static_cast<const Below*>(nullptr), &kGradientsBelow, &kAllBelow}) {
      on_each_placement(
          2,
          [&](const Mesh& mesh, const Strategy& strategy) {
            EXPECT_TRUE(first.same_bits(mesh, program(mesh, strategy)));
          },
          adjusted_to(kKept[0], below), kKept[0].param);
    }
  }
}

// A module without units has only one unit, the root.
TEST(OffloadedGradients, ModuleWithoutUnitsKeepsThemInMemory) {
  for (const int ranks : {1, 2}) {
    FirstValues first;
    for (const Below* below : {static_cast<const Below*>(nullptr), &kGradientsBelow}) {
      run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
        Strategy strategy = strategy_of(kKept[0], ShardingStrategy::kFullShard, below);
        strategy.units = {};
        strategy.gradient_accumulation = 2;
        Session session(mesh, strategy, kWide);
        for (std::size_t i = 0; i < 2; ++i) session.train(i);
        EXPECT_EQ(session.engine.plan().disk.bytes, 0);
        EXPECT_TRUE(first.same_bits(mesh, session.values()));
      });
    }
  }
}

TEST(OffloadedGradients, AveragesHaveTheBitsOfARunInMemory) {
  FirstValues first;
  for (const Below* below : {static_cast<const Below*>(nullptr), &kGradientsBelow, &kAllBelow}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_of(kKept[2], ShardingStrategy::kFullShard, below);
      strategy.ema.decay = 0.5;
      Session session(mesh, strategy, kAwkward);
      for (std::size_t i = 0; i < 3; ++i) session.train(i);
      const Gathered averages(session.engine, Gathered::kEma);
      EXPECT_TRUE(first.same_bits(mesh, values_of(*session.model)));
    });
  }
}

TEST(OffloadedGradients, DroppedMicrobatchesLeaveNothing) {
  FirstValues first;
  for (const Below* below : {static_cast<const Below*>(nullptr), &kGradientsBelow}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_of(kKept[0], ShardingStrategy::kFullShard, below);
      strategy.gradient_accumulation = 2;
      Session session(mesh, strategy, kWide);
      session.train(0);
      session.engine.backward(session.loss(0));
      session.engine.zero_grad();
      session.train(2);
      EXPECT_TRUE(first.same_bits(mesh, session.values()));
    });
  }
}

TEST(OffloadedGradients, NetworkRunHasTheBitsOfARunInMemory) {
  for (const auto& [ranks, replicas] : {std::pair(2, 1), std::pair(4, 2)}) {
    on_hosts(ranks, 2, [&, replicas = replicas](const Mesh& mesh) {
      FirstValues first;
      for (const Below* below : {static_cast<const Below*>(nullptr), &kGradientsBelow}) {
        Strategy strategy =
            strategy_of(kKept[2], replicas > 1 ? ShardingStrategy::kHybridShard : ShardingStrategy::kFullShard, below);
        Session session(mesh, strategy, kWide);
        for (std::size_t i = 0; i < 3; ++i) session.train(i);
        require(first.same_bits(session.values()), "values with gradients on disk are others");
      }
    });
  }
}

}  // namespace offloaded_gradients_test
}  // namespace tessera::testing
