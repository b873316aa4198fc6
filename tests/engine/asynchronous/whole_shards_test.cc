// Tests rules of "sync": {"type": "asynchronous"} that need norms of parameters, matrices or whole tensors: each group
// is one shard, and pushes to it give the bits of plain LibTorch, which makes the same pushes in the same order on one
// thread.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tessera/elementwise_optimizer.h"
#include "tessera/error.h"
#include "tessera/matrix_optimizer.h"
#include "tests/engine/asynchronous/order_oracle.h"
#include "tests/engine/asynchronous/whole_rules_oracle.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace whole_shards_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks = 3;

Strategy asynchronous(const Adjust& adjust) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kShardOptimizer);
  strategy.host_sharing = true;
  strategy.gradient_clipping = 0;
  strategy.sync.type = SyncType::kAsynchronous;
  if (adjust) adjust(strategy);
  return strategy;
}

Strategy in_rounds(const Adjust& adjust) {
  Strategy strategy = asynchronous(adjust);
  strategy.sync.asynchronous.max_staleness = 0;
  return strategy;
}

struct Ran {
  std::vector<std::vector<double>> losses;  ///< [rank][step]
  Values values;                            ///< the values after all ranks have pushed
};

Ran run(const Strategy& strategy, std::size_t steps, int ranks, const OrderOption& option) {
  Ran result;
  result.losses.resize(static_cast<std::size_t>(ranks));
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy, option.model, option.own_rules);
    const auto rank = static_cast<std::size_t>(mesh.rank());
    for (std::size_t i = 0; i < steps; ++i) result.losses[rank].push_back(make_step(session, option, i).loss);
    barrier(mesh);
    Values values = session.values();
    if (rank == 0) result.values = std::move(values);
  });
  return result;
}

/// Returns the option of this name.
const OrderOption& option_of(const std::string& name) {
  return *std::ranges::find(whole_order_options(), name,
                            [](const OrderOption& each) { return std::string(each.name); });
}

TEST(WholeShards, RecordedAndPlayedRunsEqualPlainLibTorchThatPlaysTheirOrder) {
  at::set_num_threads(1);
  for (const OrderOption& option : whole_order_options()) {
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(std::string(option.name) + " on " + std::to_string(ranks) + " ranks");
      const TestFolder folder;
      Strategy strategy = asynchronous(option.adjust);
      strategy.sync.asynchronous.record_order = folder / "order.jsonl";
      const Ran got = run(strategy, 4, ranks, option);
      OrderOracle oracle(strategy, ranks, option);
      oracle.play(read_lines(folder / "order.jsonl"));
      EXPECT_EQ(got.losses, oracle.losses());
      EXPECT_TRUE(all_same_bits(got.values, oracle.values()));
      if (ranks < kRanks) continue;
      strategy.sync.asynchronous.play_order = std::exchange(strategy.sync.asynchronous.record_order, "");
      const Ran again = run(strategy, 4, ranks, option);
      EXPECT_EQ(got.losses, again.losses);
      EXPECT_TRUE(all_same_bits(got.values, again.values));
    }
  }
}

TEST(WholeShards, RandomOrdersEqualPlainLibTorch) {
  at::set_num_threads(1);
  const TestFolder folder;
  const std::vector<OrderOption>& options = whole_order_options();
  const std::size_t seeds = tests_are_long() ? 100 : options.size();
  for (std::size_t seed = 0; seed < seeds; ++seed) {
    const OrderOption& option = options[seed % options.size()];
    SCOPED_TRACE(std::string(option.name) + ", seed " + std::to_string(seed));
    Strategy strategy = asynchronous(option.adjust);
    const std::string recorded = folder / std::to_string(seed % options.size());
    if (seed < options.size()) {
      strategy.sync.asynchronous.record_order = recorded;
      run(strategy, 4, kRanks, option);
      strategy.sync.asynchronous.record_order.clear();
    }
    const auto order = shuffled(read_lines(recorded), kRanks, seed);
    write_lines(folder / "random.jsonl", kRanks, order);
    strategy.sync.asynchronous.play_order = folder / "random.jsonl";
    const Ran got = run(strategy, 4, kRanks, option);
    OrderOracle oracle(strategy, kRanks, option);
    oracle.play(counted(order));
    EXPECT_EQ(got.losses, oracle.losses());
    EXPECT_TRUE(all_same_bits(got.values, oracle.values()));
  }
}

TEST(WholeShards, GroupsWhoseRuleNeedsThemAreOneShardAndOthersAreCut) {
  for (const auto& [name, is_whole_everywhere] :
       std::initializer_list<std::pair<const char*, bool>>{{"lamb", true}, {"adafactor", true}, {"muon", false}}) {
    SCOPED_TRACE(name);
    const TestFolder folder;
    Strategy strategy = asynchronous(option_of(name).adjust);
    strategy.sync.asynchronous.record_order = folder / "order.jsonl";
    run(strategy, 1, kRanks, option_of(name));
    std::map<std::pair<std::string, std::size_t>, std::set<int>> owners;
    for (const OrderLine& line : read_lines(folder / "order.jsonl")) owners[{line.unit, line.group}].insert(line.owner);
    std::set<std::size_t> numbers;
    for (const auto& [group, of_group] : owners) numbers.insert(of_group.size());
    EXPECT_EQ(numbers, is_whole_everywhere ? std::set<std::size_t>{1} : (std::set<std::size_t>{1, kRanks}));
  }
}

TEST(WholeShards, RankAloneHasTheBitsOfPlainTraining) {
  at::set_num_threads(1);
  for (const char* name : {"lamb", "lars, clipped by the norm", "muon", "adafactor", "a program's rule of matrices"}) {
    SCOPED_TRACE(name);
    const OrderOption& option = option_of(name);
    const Strategy strategy = asynchronous(option.adjust);
    Strategy plain = strategy;
    plain.sync = {};
    const Ran got = run(strategy, 5, /*ranks=*/1, option), wanted = run(plain, 5, /*ranks=*/1, option);
    EXPECT_EQ(got.losses, wanted.losses);
    EXPECT_TRUE(all_same_bits(got.values, wanted.values));
  }
}

TEST(WholeShards, MemoryEqualsThePlan) {
  for (const OrderOption& option : whole_order_options()) {
    SCOPED_TRACE(option.name);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const Strategy strategy = asynchronous(option.adjust);
      Session session(mesh, strategy, option.model, option.own_rules);
      const StepResult result = session.train(0);
      EXPECT_EQ(result.planned, result.allocated);
      const OwnRules& own = option.own_rules;
      EXPECT_EQ(plan_memory(*session.model, strategy, mesh.topology(), own).use, result.planned);
      barrier(mesh);
    });
  }
}

TEST(WholeShards, CheckpointResumesWithTheSameBits) {
  at::set_num_threads(1);
  for (const char* name : {"lamb", "muon", "adafactor"}) {
    SCOPED_TRACE(name);
    const TestFolder folder;
    const Strategy strategy = in_rounds(option_of(name).adjust);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Values wanted;
      {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < 3; ++i) session.train(i);
        save_checkpoint(session.engine, folder.path());
        for (std::size_t i = 3; i < 5; ++i) session.train(i);
        barrier(mesh);
        wanted = session.values();
        barrier(mesh);
      }
      Session session(mesh, strategy);
      load_checkpoint(session.engine, folder.path());
      for (std::size_t i = 3; i < 5; ++i) session.train(i);
      barrier(mesh);
      EXPECT_TRUE(all_same_bits(session.values(), wanted));
      barrier(mesh);
    });
  }
}

/// SGD as a program's own rule.
class OwnSgd final : public ElementwiseOptimizer {
 public:
  std::vector<std::string> states() const override { return {}; }
  void update(Elements& e) const override { e.parameters.sub_(e.gradient * static_cast<float>(e.lr)); }
};

TEST(WholeShards, ProgramsRuleOfElementsHasTheBitsOfTheSameRule) {
  const Strategy own = in_rounds([](Strategy& s) { s.optimizer = {.type = OptimizerType::kOwn, .lr = 0.1}; });
  const Strategy named = in_rounds(
      [](Strategy& s) { s.optimizer = {.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0, .momentum = 0}; });
  const Ran got = run(own, 4, kRanks, {.own_rules = OwnRules::of(std::make_shared<OwnSgd>())});
  const Ran wanted = run(named, 4, kRanks, {});
  EXPECT_EQ(got.losses, wanted.losses);
  EXPECT_TRUE(all_same_bits(got.values, wanted.values));
}

/// A rule that leaves matrices as they are, and throws in its third call if it `throws`.
class Throws final : public MatrixOptimizer {
 public:
  explicit Throws(bool throws) : throws_(throws) {}
  std::vector<State> states(std::int64_t, std::int64_t) const override { return {}; }
  void update(Matrix&) const override {
    if (throws_ && ++calls_ > 2) throw std::runtime_error("a rule with a toothache");
  }

 private:
  const bool throws_;
  mutable int calls_ = 0;
};

TEST(WholeShards, ProgramsRuleThatThrowsEndsAllRanks) {
  std::vector<std::string> errors(2);
  error_of([&] {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      const Strategy strategy = asynchronous([](Strategy& s) { s.optimizer.type = OptimizerType::kOwnMatrix; });
      Session session(mesh, strategy, {}, OwnRules::of(std::make_shared<Throws>(mesh.rank() == 0)));
      errors[static_cast<std::size_t>(mesh.rank())] = error_of([&] {
        for (std::size_t i = 0; i < 10'000; ++i) session.train(i);
      });
    });
  });
  EXPECT_THAT(errors[0], HasSubstr("a rule with a toothache"));
  EXPECT_NE(errors[1], "");
}

TEST(WholeShards, RulesThatNeedWholeTensorsAreRefusedWhereNobodyHasThem) {
  const auto error_with = [](const std::string& sync, const std::string& type) {
    return error_of([&] {
      Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", "sync": {)" + sync + R"(}, "optimizer": {"type": ")" +
                          type + R"("}})");
    });
  };
  for (const char* type : {"muon", "lamb", "lars", "adafactor", "own", "own_matrix"}) {
    SCOPED_TRACE(type);
    EXPECT_EQ(error_with(R"("type": "asynchronous")", type), "");
    EXPECT_THAT(error_with(R"("type": "hogwild")", type),
                AllOf(HasSubstr("hogwild cannot stand beside optimizer.type"), HasSubstr("merged one by one")));
    EXPECT_THAT(error_with(R"("type": "backups", "count": 1)", type),
                AllOf(HasSubstr("backups cannot stand beside optimizer.type"), HasSubstr("side by side")));
  }
}

}  // namespace whole_shards_test
}  // namespace tessera::testing
