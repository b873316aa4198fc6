// Tests HogwildValues without an Engine: ranks update one copy of parameters at the same time. Also tests the words of
// memory in which ranks read and write this copy.

#include "engine/asynchronous/hogwild_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "engine/asynchronous/wild_words.h"
#include "engine/device/accelerator.h"
#include "engine/memory/make_plan.h"
#include "engine/memory/training_memory.h"
#include "runtime/border/throw.h"
#include "runtime/comm/local/local_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "sharding/partition.h"

namespace tessera::testing {
namespace hogwild_values_test {

using ::testing::Each;
using ::testing::ElementsAre;

Strategy strategy_of(OptimizerType type, StateSharing states) {
  Strategy strategy;
  strategy.strategy = ShardingStrategy::kShardOptimizer;
  strategy.optimizer.type = type;
  strategy.optimizer.lr = 0.05;
  strategy.sync.type = SyncType::kHogwild;
  strategy.sync.asynchronous.states = states;
  strategy.units.classes = {"Linear"};
  fill_in_defaults(strategy.optimizer);
  return strategy;
}

/// Returns a strategy of SGD that subtracts gradients from the values as they are.
Strategy adding() {
  Strategy strategy = strategy_of(OptimizerType::kSgd, StateSharing::kOwn);
  strategy.optimizer.lr = 1;
  strategy.optimizer.weight_decay = 0;
  return strategy;
}

Strategy with_momentum(StateSharing states) {
  Strategy strategy = strategy_of(OptimizerType::kSgd, states);
  strategy.optimizer.momentum = 0.9;
  strategy.optimizer.weight_decay = 0;
  return strategy;
}

/// A rank without an Engine: memory and values.
class Rank {
 public:
  Rank(const Mesh& mesh, const Strategy& strategy)
      : module_(torch::nn::Sequential(torch::nn::Linear(93, 141), torch::nn::Linear(141, 7))),
        units_(partition(*module_, strategy, mesh.world_size(), nullptr, nullptr)),
        optimizer_(make_optimizer(strategy.optimizer)),
        rates_(strategy.optimizer),
        rule_(strategy, OwnRules{}, rates_) {
    PlanScene scene{MeshPosition{1, mesh.world_size(), 0, mesh.rank()}};
    scene.sync = strategy.sync;
    scene.shares_memory = true;
    plan_ = make_plan(units_, strategy, scene, *optimizer_);
    axes_.reduce = axes_.replicate = axes_.world = axes_.control =
        std::make_shared<LocalCollectives>(0, 1, /*one_host=*/false);
    axes_.gather = value_or_throw(groups_of(mesh).world("parameters"));
    memory_ = TrainingMemory::allocate(plan_, units_, axes_, Accelerator(), {});
    board_ = std::make_unique<PeerBoard>(value_or_throw(groups_of(mesh).world("board")), /*timeout_s=*/60);
    values_ = std::make_unique<HogwildValues>(units_, plan_, *board_);
  }

  /// Makes one step in which the gradient of element `i` of a group is `gradient(i)`.
  template <class Gradient>
  GradientAges step(const Gradient& gradient) {
    std::size_t parameters = 0;
    for_each_trainable(units_, [&](FlatGroup& group) {
      parameters += group.parameters.size();
      for (std::int64_t i = 0; i < group.layout.numel(); ++i) group.gradient[i] = gradient(i);
    });
    const std::vector<char> used(parameters, 1);
    return values_->push(rule_, {{.lr = rates_.everybodys()}, used});
  }

  std::vector<FlatGroup*> groups() {
    std::vector<FlatGroup*> list;
    for_each_trainable(units_, [&](FlatGroup& group) { list.push_back(&group); });
    return list;
  }
  static std::span<float> values_of(const FlatGroup& group) {
    return {reinterpret_cast<float*>(group.full), static_cast<std::size_t>(group.layout.numel())};
  }
  /// Returns a state of a whole group that this rank has for itself.
  static std::span<float> own_state_of(const FlatGroup& group, std::size_t i) {
    return {reinterpret_cast<float*>(group.state[i].data) - group.optimizer_part.offset,
            static_cast<std::size_t>(group.layout.numel())};
  }
  HogwildValues& values() { return *values_; }
  PeerBoard& board() { return *board_; }
  const MemoryPlan& plan() const { return plan_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  const LearningRates& rates() const { return rates_; }
  std::size_t units() const { return units_.size(); }
  void meet() { board_->meet("a test"); }

 private:
  torch::nn::Sequential module_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<Optimizer> optimizer_;
  LearningRates rates_;
  ShardRule rule_;
  MemoryPlan plan_;
  MeshAxes axes_;
  TrainingMemory memory_;
  std::unique_ptr<PeerBoard> board_;
  std::unique_ptr<HogwildValues> values_;
};

TEST(WildWords, MergedUpdateHasItsOwnBitsWhereNobodyElseWroteAndIsAddedElsewhere) {
  const std::vector<float> before = {0.1F, 1.0F, 3.0F, -0.0F}, after = {0.3F, 1.5F, 3.0F, 0.0F};
  std::vector<float> shared = {0.1F, 2.0F, 7.0F, -0.0F};  // other ranks have changed the second and third value
  merge_words(shared.data(), before.data(), after.data(), 4);
  EXPECT_THAT(shared, ElementsAre(0.3F, 2.5F, 7.0F, 0.0F));
  EXPECT_FALSE(std::signbit(shared[3]));
}

TEST(WildWords, WordThatAnUpdateLeavesAsItIsIsNotWritten) {
  const std::vector<float> before = {1.0F, 2.0F}, after = {1.0F, 5.0F};
  std::vector<float> shared = {9.0F, 9.0F};
  write_words(shared.data(), before.data(), after.data(), 2);
  EXPECT_THAT(shared, ElementsAre(9.0F, 5.0F));
}

TEST(HogwildValues, OneRankHasTheBitsOfTheRuleItself) {
  for (const StateSharing states : {StateSharing::kOwn, StateSharing::kShared}) {
    for (const Strategy& strategy :
         {strategy_of(OptimizerType::kSgd, states), with_momentum(states), strategy_of(OptimizerType::kAdagrad, states),
          strategy_of(OptimizerType::kAdamW, states)}) {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Rank rank(mesh, strategy);
        FlatGroup& group = *rank.groups()[0];
        const auto n = static_cast<std::size_t>(group.layout.numel());
        const auto gradient_of = [](std::int64_t step, std::int64_t i) {
          return static_cast<float>((i * 7 + step * 29) % 31) * 0.03125F - 0.5F;
        };
        std::vector<float> values(n), gradient(n), states_of_rule[kMostStates];
        for (std::size_t i = 0; i < n; ++i) Rank::values_of(group)[i] = values[i] = static_cast<float>(i % 17) * 0.1F;
        OptimizerSlice slice;
        slice.gradient = gradient;
        slice.master = values;
        for (std::size_t s = 0; s < rank.optimizer().states().size(); ++s) {
          states_of_rule[s].resize(n);
          slice.states[s].data = std::as_writable_bytes(std::span(states_of_rule[s]));
        }
        for (std::int64_t step = 1; step <= 4; ++step) {
          rank.step([&](std::int64_t i) { return gradient_of(step, i); });
          for (std::size_t i = 0; i < n; ++i) gradient[i] = gradient_of(step, static_cast<std::int64_t>(i));
          rank.optimizer().step({.lr = static_cast<float>(rank.rates().everybodys()), .step = step}, slice);
        }
        EXPECT_EQ(std::memcmp(values.data(), Rank::values_of(group).data(), n * sizeof(float)), 0);
      });
    }
  }
}

// Rank r adds 128^r to every element in each of its steps, so an element's digits in base 128 say how often each rank
// has written it. If a number is torn between two writers, its digits are no such counts.
TEST(HogwildValues, EveryElementThatIsReadWasWrittenBySomebody) {
  constexpr int kRanks = 3, kSteps = 100;
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Rank rank(mesh, adding());
    const float own = static_cast<float>(1 << (7 * mesh.rank()));
    std::int64_t wrong = 0, of_others = 0;
    std::vector<std::int64_t> sums(kRanks);
    const auto look = [&] {
      std::ranges::fill(sums, 0);
      std::vector<float> seen;
      for (FlatGroup* group : rank.groups()) {
        seen.resize(static_cast<std::size_t>(group->layout.numel()));
        read_words(Rank::values_of(*group).data(), seen.data(), std::ssize(seen));
        for (const float value : seen) {
          const auto whole = static_cast<std::int64_t>(value);
          bool is_known = value >= 0 && static_cast<float>(whole) == value && whole >> (7 * kRanks) == 0;
          for (int q = 0; q < kRanks; ++q) {
            const std::int64_t count = whole >> (7 * q) & 127;
            is_known = is_known && count <= rank.board().pushed(q) + 1;  // part of the update under way may be visible
            sums[static_cast<std::size_t>(q)] += count;
          }
          wrong += is_known ? 0 : 1;
        }
      }
      for (int q = 0; q < kRanks; ++q) of_others += q == mesh.rank() ? 0 : sums[static_cast<std::size_t>(q)];
    };
    for (int i = 0; i < kSteps; ++i) {
      if (i % 10 == 0) rank.meet();  // on few cores, one rank could otherwise end before another begins
      rank.step([&](std::int64_t) { return -own; });
      look();
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(of_others, 0) << "no update of another rank was seen while this one trained";
    rank.meet();
    look();
    EXPECT_EQ(wrong, 0);
    std::int64_t elements = 0;
    for (FlatGroup* group : rank.groups()) elements += group->layout.numel();
    for (const std::int64_t sum : sums) EXPECT_GT(sum, elements * kSteps * 9 / 10) << "most updates are not lost";
    rank.meet();
  });
}

// Every value is 2^20 + n * 8193, so its word has n in both of its halves. Ranks move n up and down. If the halves of a
// word come from two writes, they have different n.
TEST(HogwildValues, NoElementIsTornBetweenTwoWrites) {
  constexpr int kRanks = 3, kSteps = 2000;
  constexpr std::int64_t kBase = 1 << 20, kTwice = 8193;
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Rank rank(mesh, adding());
    if (mesh.rank() == 0) {
      for (FlatGroup* group : rank.groups())
        std::ranges::fill(Rank::values_of(*group), static_cast<float>(kBase + 64 * kTwice));
    }
    rank.meet();
    std::int64_t torn = 0, changed = 0;
    std::vector<float> seen;
    for (int i = 0; i < kSteps; ++i) {
      const auto own = static_cast<float>(kTwice << mesh.rank());
      rank.step([&](std::int64_t) { return i % 2 == 0 ? -own : own; });
      const FlatGroup& group = *rank.groups()[static_cast<std::size_t>(i) % rank.groups().size()];
      seen.resize(static_cast<std::size_t>(group.layout.numel()));
      read_words(Rank::values_of(group).data(), seen.data(), std::ssize(seen));
      for (const float value : seen) {
        const std::int64_t twice = static_cast<std::int64_t>(value) - kBase;
        torn += twice % kTwice == 0 ? 0 : 1;
        changed += twice == 64 * kTwice ? 0 : 1;
      }
    }
    EXPECT_EQ(torn, 0);
    EXPECT_GT(changed, 0);
    rank.meet();
  });
}

TEST(HogwildValues, AgeIsTheNumberOfStepsByOthers) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Rank rank(mesh, adding());
    const auto none = [](std::int64_t) { return 0.0F; };
    if (mesh.rank() == 0) {
      EXPECT_EQ(rank.step(none).most, 0);
    }
    rank.meet();
    if (mesh.rank() == 1) {
      EXPECT_EQ(rank.step(none).most, 1);
      rank.values().skip();
      EXPECT_EQ(rank.step(none).most, 0);
    }
    rank.meet();
    if (mesh.rank() == 0) {
      EXPECT_EQ(rank.step(none).most, 3);
    }
    rank.meet();
  });
}

TEST(HogwildValues, SharedStatesCountTheUpdatesOfAllRanksAndOwnStatesThoseOfTheirRank) {
  constexpr int kRanks = 2, kSteps = 5;
  for (const StateSharing states : {StateSharing::kOwn, StateSharing::kShared}) {
    run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
      Rank rank(mesh, strategy_of(OptimizerType::kAdamW, states));
      for (int i = 0; i < kSteps + mesh.rank(); ++i) rank.step([](std::int64_t) { return 0.25F; });
      rank.meet();
      const bool own = states == StateSharing::kOwn;
      for (FlatGroup* group : rank.groups())
        EXPECT_THAT(rank.values().counts(*group), Each(own ? kSteps + mesh.rank() : 2 * kSteps + 1));
      rank.meet();
      rank.values().bring_together();
      for (FlatGroup* group : rank.groups())
        EXPECT_THAT(rank.values().counts(*group), Each(own ? kSteps + 1 : 2 * kSteps + 1));
      rank.meet();
    });
  }
}

TEST(HogwildValues, StatesOfTheirOwnBecomeTheMeanWhenRanksComeTogether) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    Rank rank(mesh, with_momentum(StateSharing::kOwn));
    if (mesh.rank() < 2) rank.step([&](std::int64_t i) { return static_cast<float>(i % 5 + 8 * mesh.rank()); });
    rank.values().bring_together();  // the third rank has no momentum yet, so it is left out of the mean
    for (FlatGroup* group : rank.groups()) {
      const std::span<float> momentum = Rank::own_state_of(*group, 0);
      std::int64_t other = 0;
      for (const FlatParameter& parameter : group->parameters) {
        const Extent extent = group->layout.extent(static_cast<std::size_t>(&parameter - group->parameters.data()));
        for (std::int64_t i = extent.offset; i < extent.end(); ++i)
          other += momentum[static_cast<std::size_t>(i)] == static_cast<float>(i % 5 + 4) ? 0 : 1;
      }
      EXPECT_EQ(other, 0);
    }
    rank.meet();
  });
}

TEST(HogwildValues, MemoryEqualsThePlan) {
  constexpr int kRanks = 3;
  std::int64_t own = 0, shared = 0;
  for (const StateSharing states : {StateSharing::kOwn, StateSharing::kShared}) {
    run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
      Rank rank(mesh, strategy_of(OptimizerType::kAdamW, states));
      EXPECT_EQ(rank.values().memory_bytes(), rank.plan().use()[MemoryCategory::kOptimizer]);
      if (mesh.rank() == 0) (states == StateSharing::kOwn ? own : shared) = rank.values().memory_bytes();
      rank.meet();
    });
  }
  EXPECT_EQ(own, kRanks * shared);
}

}  // namespace hogwild_values_test
}  // namespace tessera::testing
