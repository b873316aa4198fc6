// Tests that a rank for which the other ranks wait is named, once in each window and in each step's result, and that
// equally fast ranks are not named.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/step/agree/straggler_watch.h"
#include "engine/training/backup_claims.h"
#include "engine/training/microbatch_dealer.h"
#include "runtime/base/log.h"
#include "runtime/comm/key_value_store.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/layout/plan/microbatch_deal.h"
#include "tests/support/limits/patience.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace stragglers_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Returns the text of a watch at the end of a window of steps. `busy` has the seconds for which each rank was busy.
std::string said(const std::vector<double>& busy) {
  StragglerWatch watch(busy.size());
  for (std::size_t step = 1; step < StragglerWatch::kWindow; ++step) EXPECT_EQ(watch.add(busy), "");
  return watch.add(busy);
}

/// Returns the deal after `window` steps: the number of microbatches of each rank. One microbatch takes a rank
/// `seconds_of_one` [rank].
std::vector<std::int64_t> dealt(MicrobatchDealer& dealer, const std::vector<double>& seconds_of_one, int window) {
  std::vector<std::int64_t> counts;
  for (int step = 0; step < window; ++step) {
    std::vector<double> busy;
    for (std::size_t rank = 0; rank < seconds_of_one.size(); ++rank)
      busy.push_back(seconds_of_one[rank] * static_cast<double>(dealer.order().count_of(static_cast<int>(rank))));
    const bool changes = dealer.add(busy);
    EXPECT_TRUE(!changes || step + 1 == window) << "within a window";
  }
  for (std::size_t rank = 0; rank < seconds_of_one.size(); ++rank)
    counts.push_back(dealer.order().count_of(static_cast<int>(rank)));
  return counts;
}

TEST(MicrobatchDealer, RanksGetAsManyMicrobatchesAsTheyAreFast) {
  using Counts = std::vector<std::int64_t>;
  Strategy strategy;
  strategy.gradient_accumulation = 12;
  strategy.deal = {.by = DealBy::kSpeed, .window = 3};
  MicrobatchDealer dealer(strategy, 2);
  EXPECT_EQ(dealer.order().count_of(0), 12);
  EXPECT_EQ(dealt(dealer, {0.1, 0.2}, 3), (Counts{16, 8}));
  EXPECT_EQ(dealer.order().run_of(1), (TreeBlock{16, 24}));
  EXPECT_EQ(dealer.order().rank_of(15), 0);
  EXPECT_EQ(dealer.order().rank_of(16), 1);
  EXPECT_EQ(dealer.order().round_of(18), 2);
  EXPECT_EQ(dealt(dealer, {0.1, 0.201}, 3), (Counts{16, 8})) << "no better deal";
  EXPECT_EQ(dealt(dealer, {0.1, 0.1}, 3), (Counts{12, 12}));
  EXPECT_EQ(dealt(dealer, {0.001, 100}, 3), (Counts{23, 1})) << "everybody has one";
  strategy.deal.longest = 14;
  MicrobatchDealer bounded(strategy, 2);
  EXPECT_EQ(dealt(bounded, {0.1, 0.9}, 3), (Counts{14, 10}));
  strategy.gradient_accumulation = 1;
  strategy.deal = {.by = DealBy::kSpeed, .window = 3, .microbatches = 25};
  MicrobatchDealer odd(strategy, 2);
  EXPECT_EQ(odd.order().run_of(0), (TreeBlock{0, 12}));
  EXPECT_EQ(odd.order().run_of(1), (TreeBlock{12, 25}));
  EXPECT_EQ(dealt(odd, {0.1, 0.2}, 3), (Counts{17, 8}));
  const MicrobatchOrder even = microbatch_order(strategy, 4);
  for (std::int64_t i = 0; i < 25; ++i) {
    const TreeBlock run = even.run_of(even.rank_of(i));
    EXPECT_TRUE(run.begin <= i && i < run.end && even.index(even.rank_of(i), even.round_of(i)) == i) << i;
  }
  strategy.gradient_accumulation = 12;
  strategy.deal = {.by = DealBy::kSpeed, .window = 3, .longest = 14};
  MicrobatchDealer four(strategy, 4);
  EXPECT_EQ(dealt(four, {0.1, 0.1, 0.1, 0.2}, 3), (Counts{14, 14, 14, 6}));
}

/// Tries all deals of `all` microbatches to ranks that need `seconds` [rank] for one. Each rank gets 1 to `longest`.
/// Returns the seconds of the best deal.
double seconds_of_best_deal(std::span<const double> seconds, std::int64_t all, std::int64_t longest) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  if (seconds.size() == 1) return all >= 1 && all <= longest ? static_cast<double>(all) * seconds[0] : kNever;
  double best = kNever;
  for (std::int64_t count = 1; count <= std::min(longest, all - 1); ++count) {
    const double others = seconds_of_best_deal(seconds.subspan(1), all - count, longest);
    best = std::min(best, std::max(static_cast<double>(count) * seconds[0], others));
  }
  return best;
}

std::vector<double> random_speeds(std::size_t ranks, std::mt19937& random) {
  std::vector<double> seconds;
  for (std::size_t rank = 0; rank < ranks; ++rank) seconds.push_back(0.01 * static_cast<double>(1 + random() % 40));
  return seconds;
}

TEST(MicrobatchDealer, NoWholeDealEndsBeforeTheOneThatIsChosen) {
  std::mt19937 random(5);
  for (int ranks = 2; ranks <= 4; ++ranks) {
    for (std::int64_t all = ranks; all <= 12; ++all) {
      for (const std::int64_t longest : {(all + ranks - 1) / ranks, 2 * ((all + ranks - 1) / ranks), all}) {
        Strategy strategy;
        strategy.deal = {.by = DealBy::kSpeed, .longest = longest, .microbatches = all};
        const MicrobatchOrder order = microbatch_order(strategy, ranks);
        for (int i = 0; i < 10; ++i) {
          const std::vector<double> seconds = random_speeds(static_cast<std::size_t>(ranks), random);
          std::vector<std::int64_t> counts(seconds.size());
          share_out(order, seconds, counts);
          EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), all);
          EXPECT_GE(std::ranges::min(counts), 1);
          EXPECT_LE(std::ranges::max(counts), order.longest);
          EXPECT_EQ(seconds_of_deal(counts, seconds), seconds_of_best_deal(seconds, all, order.longest))
              << ranks << " ranks, " << all << " microbatches, at most " << longest;
        }
      }
    }
  }
}

// The dealer makes a new deal only if this deal is at least 3 % better than the present one.
TEST(MicrobatchDealer, StepsOfOtherNumbersOfMicrobatchesAreWithinAFewPercentOfTheBestWholeDeal) {
  std::mt19937 random(7);
  for (const std::int64_t all : {10, 25}) {
    for (int ranks = 2; ranks <= 4; ++ranks) {
      Strategy strategy;
      strategy.deal = {.by = DealBy::kSpeed, .window = 3, .microbatches = all};
      MicrobatchDealer dealer(strategy, ranks);
      for (int i = 0; i < 20; ++i) {
        const std::vector<double> seconds = random_speeds(static_cast<std::size_t>(ranks), random);
        const std::vector<std::int64_t> counts = dealt(dealer, seconds, 3);
        EXPECT_LE(seconds_of_deal(counts, seconds), 1.05 * seconds_of_best_deal(seconds, all, dealer.order().longest))
            << ranks << " ranks, " << all << " microbatches";
      }
    }
  }
}

using Next = std::optional<std::int64_t>;

/// Runs `body` on two ranks: first on one host, where claims lie in shared memory, and then on two hosts, where they
/// are in the store.
void with_claims(const std::function<void(const Mesh&)>& body) {
  for (const int hosts : {1, 2}) run_ranks({.ranks = 2, .hosts = hosts}, body);
}

/// Makes the claims of two ranks with two microbatches each.
BackupClaims claims_of(const Mesh& mesh) {
  MicrobatchOrder order{2, 2, /*has_runs=*/true, /*longest=*/3, {0, 2}};
  order.backups = 1;
  MeshGroups& groups = groups_of(mesh);
  return {*groups.world("deal"), order, {groups.store(), groups.watch(), std::chrono::minutes(1)}};
}

/// A store whose other connections get no answer for a while, as if the host that serves it had vanished.
class SilentStore final : public KeyValueStore {
 public:
  /// `store` has the answers; null: this connection gets no answer.
  explicit SilentStore(KeyValueStore* store) : store_(store) {}

  absl::Status set(const std::string& key, const std::string& value) override {
    return store_ ? store_->set(key, value) : absl::OkStatus();
  }
  absl::StatusOr<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
    return store_ ? store_->get(key, timeout) : absl::StatusOr<std::string>("");
  }
  absl::StatusOr<bool> has(const std::string& key) override {
    return store_ ? store_->has(key) : absl::StatusOr<bool>(false);
  }
  absl::StatusOr<std::int64_t> add(const std::string& key, std::int64_t amount) override {
    if (store_) return store_->add(key, amount);
    std::this_thread::sleep_for(std::chrono::seconds(2));
    return amount;
  }
  std::shared_ptr<KeyValueStore> connected_anew() override { return std::make_shared<SilentStore>(nullptr); }

 private:
  KeyValueStore* const store_;
};

TEST(BackupClaims, StoreThatDoesNotAnswerIsALostPeer) {
  run_ranks({.ranks = 2, .hosts = 2}, [](const Mesh& mesh) {
    SilentStore store(&groups_of(mesh).store());
    MicrobatchOrder order{2, 2, /*has_runs=*/true, /*longest=*/3, {0, 2}};
    order.backups = 1;
    BackupClaims claims(*groups_of(mesh).world("deal"), order,
                        {store, groups_of(mesh).watch(), std::chrono::milliseconds(20)});
    EXPECT_THAT(error_of([&] { claims.end(); }), HasSubstr("comm.timeout_s"));
  });
}

TEST(BackupClaims, WhoMakesAMicrobatchFirstHasItAndTheOtherResultDoesNotCount) {
  std::barrier meet(2);
  with_claims([&](const Mesh& mesh) {
    BackupClaims claims = claims_of(mesh);
    if (mesh.rank() == 0) {
      EXPECT_TRUE(claims.end());
      EXPECT_EQ(claims.next(), Next(1));
      EXPECT_EQ(claims.round(), 1);
      EXPECT_TRUE(claims.end());
      EXPECT_EQ(claims.next(), Next(3)) << "the last one of the rank that has made none";
      EXPECT_EQ(claims.turn(), std::optional(0));
      EXPECT_EQ(claims.round(), 3) << "behind the longest run";
      EXPECT_FALSE(claims.is_overtaken());
      meet.arrive_and_wait();
      meet.arrive_and_wait();
      EXPECT_TRUE(claims.is_overtaken());
      EXPECT_FALSE(claims.end());
    } else {
      meet.arrive_and_wait();
      EXPECT_TRUE(claims.end());
      EXPECT_EQ(claims.next(), Next(3)) << "claimed, and not made yet";
      EXPECT_TRUE(claims.end());
      meet.arrive_and_wait();
    }
    EXPECT_EQ(claims.next(), std::nullopt);
    const MicrobatchOrder& order = claims.agree();
    EXPECT_TRUE(order.made_again.empty());
    EXPECT_EQ(order.kept_of(1), (TreeBlock{2, 4}));
    EXPECT_EQ(claims.computed()[0], 3);
    EXPECT_EQ(claims.computed()[1], 2);
  });
}

TEST(BackupClaims, MicrobatchesThatWereMadeAgainAreTheEndOfARun) {
  std::barrier meet(2);
  with_claims([&](const Mesh& mesh) {
    BackupClaims claims = claims_of(mesh);
    const MicrobatchOrder runs{2, 2, /*has_runs=*/true, /*longest=*/3, {0, 2}, /*backups=*/1};
    for (int step = 0; step < 4; ++step) {  // counters are used again
      if (mesh.rank() == 0) {
        for (int i = 0; i < 3; ++i) EXPECT_TRUE(claims.end()) << i;
        EXPECT_EQ(claims.next(), std::nullopt) << "it may take one";
        meet.arrive_and_wait();
      } else {
        meet.arrive_and_wait();
        EXPECT_FALSE(claims.is_overtaken());
        EXPECT_TRUE(claims.end());
        EXPECT_EQ(claims.next(), std::nullopt) << "the other one was made";
      }
      const MicrobatchOrder& order = claims.agree();
      EXPECT_EQ(order.made_again.size(), 1U);
      EXPECT_EQ(order.kept_of(0), (TreeBlock{0, 2}));
      EXPECT_EQ(order.kept_of(1), (TreeBlock{2, 3}));
      EXPECT_EQ(std::pair(order.rank_of(3), order.round_of(3)), (std::pair<int, std::int64_t>(0, 3)));
      EXPECT_EQ(std::pair(order.rank_of(2), order.round_of(2)), (std::pair<int, std::int64_t>(1, 0)));
      claims.begin_step(runs);
    }
  });
}

// Rank 1 is less far behind after each microbatch that it ends.
TEST(BackupClaims, RanksThatAreEquallyFastLeaveEachOthersMicrobatchesAlone) {
  std::barrier meet(2);
  with_claims([&](const Mesh& mesh) {
    BackupClaims claims = claims_of(mesh);
    if (mesh.rank() == 1) {
      EXPECT_TRUE(claims.end());
    }
    meet.arrive_and_wait();
    if (mesh.rank() == 0) {
      EXPECT_TRUE(claims.end());
      EXPECT_TRUE(claims.end());
      EXPECT_EQ(claims.next(), std::nullopt);
    }
    meet.arrive_and_wait();
    if (mesh.rank() == 1) {
      EXPECT_TRUE(claims.end());
    }
    EXPECT_TRUE(claims.agree().made_again.empty());
  });
}

TEST(MicrobatchDealer, SpeedsAreThoseOfTheMicrobatchesThatRanksMade) {
  Strategy strategy;
  strategy.gradient_accumulation = 6;
  strategy.deal = {.by = DealBy::kSpeed, .window = 1};
  MicrobatchDealer dealer(strategy, 2);
  EXPECT_FALSE(dealer.add(std::vector{0.8, 0.4}, std::vector<std::int64_t>{8, 4})) << "rank 0 made two of rank 1 again";
  EXPECT_TRUE(dealer.add(std::vector{0.8, 0.8}, std::vector<std::int64_t>{8, 4}));
  EXPECT_EQ(dealer.order().count_of(0), 8);
}

TEST(StragglerWatch, SlowRanksAreNamedWithTheirTimeAndTheMedian) {
  EXPECT_EQ(said({0.1}), "");
  EXPECT_EQ(said({0.1, 0.1, 0.1, 0.14}), "");
  EXPECT_THAT(said({0.1, 0.1, 0.3, 0.1}),
              AllOf(HasSubstr("rank 2 is busy for 300.0 ms a step"), HasSubstr("the median of all ranks is 100.0 ms"),
                    HasSubstr("the last 50 steps"), Not(HasSubstr("rank 1"))));
  EXPECT_THAT(said({0.3, 0.1}), AllOf(HasSubstr("rank 0 "), HasSubstr("median of all ranks is 100.0 ms")));
  EXPECT_THAT(said({0.1, 0.3, 0.1, 0.4, 0.1}), AllOf(HasSubstr("rank 1 "), HasSubstr(", rank 3 ")));
  EXPECT_EQ(said({0.001, 0.009}), "");  // 8 ms are too little to report
  std::vector<double> many(100, 0.1);
  for (std::size_t rank = 0; rank < 12; ++rank) many[rank] = 0.2;
  EXPECT_THAT(said(many), HasSubstr("and 4 more ranks likewise"));
}

TEST(StragglerWatch, SingleSlowStepsNameNoRank) {
  StragglerWatch watch(2);
  for (std::size_t step = 1; step <= 3 * StragglerWatch::kWindow; ++step)
    EXPECT_EQ(watch.add(step % 3 == 0 ? std::vector{9.0, 0.1} : std::vector{0.1, 0.1}), "");
}

TEST(StragglerWatch, RanksAreCountedFromTheFirst) {
  StragglerWatch watch(2, /*first_rank=*/4);
  for (std::size_t step = 1; step < StragglerWatch::kWindow; ++step) EXPECT_EQ(watch.add(std::vector{0.1, 0.9}), "");
  EXPECT_THAT(watch.add(std::vector{0.1, 0.9}), HasSubstr("rank 5 is busy for 900.0 ms"));
}

TEST(StragglerWatch, EachWindowIsJudgedByItself) {
  StragglerWatch watch(2);
  int messages = 0;
  for (std::size_t step = 0; step < 4 * StragglerWatch::kWindow; ++step) {
    const bool is_slow = step < 2 * StragglerWatch::kWindow;
    messages += !watch.add(is_slow ? std::vector{0.1, 0.9} : std::vector{0.1, 0.1}).empty();
  }
  EXPECT_EQ(messages, 2);
}

TEST(WaitedFor, NamesTheSlowestRankAndTheMeanWaitOfTheOthers) {
  const auto of = [](const std::vector<double>& busy) {
    const WaitedFor waited = waited_for(busy);
    return std::pair(waited.rank, waited.seconds);
  };
  EXPECT_EQ(of({0.5}), std::pair(-1, 0.0));
  EXPECT_EQ(of({0.5, 0.25}), std::pair(0, 0.25));
  EXPECT_EQ(of({0.5, 0.25, 2.0, 0.25}), std::pair(2, (1.5 + 1.75 + 1.75) / 3));
  EXPECT_EQ(of({0.5, 0.5}), std::pair(0, 0.0));
  EXPECT_EQ(waited_for(std::vector{0.5, 2.0}, /*first_rank=*/4).rank, 5);
  EXPECT_EQ(waited_for(std::vector{0.5}, /*first_rank=*/4).rank, -1);
}

/// Trains three ranks. Rank 1 is late in every step.
void train_with_a_late_rank(std::chrono::milliseconds late, const Placed& placed) {
  run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(placed));
    for (std::size_t step = 0; step < StragglerWatch::kWindow; ++step) {
      if (mesh.rank() == 1) std::this_thread::sleep_for(late);
      session.train(step % session.batches.size());
    }
  });
}

std::size_t count_in(const std::string& text, const std::string& part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

// Fault F6 (docs/faults.md): time in which a rank waits for another one does not count as its own time. The worlds
// train at the same time, since each waits for most of its time.
TEST(Stragglers, EngineNamesTheSlowRank) {
  const std::chrono::milliseconds late = patient(std::chrono::milliseconds(25));
  set_log_level(LogLevel::kWarning);
  ::testing::internal::CaptureStderr();
  {
    std::vector<std::jthread> worlds;
    for (const Placed& placed : kInMemory)
      worlds.emplace_back([late, placed] { train_with_a_late_rank(late, placed); });
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(count_in(log, "step 50: rank 1 is busy for"), kInMemory.size()) << log;
  EXPECT_THAT(log, AllOf(Not(HasSubstr("rank 0 is")), Not(HasSubstr("rank 2 is"))));
}

TEST(Stragglers, EveryRanksResultTellsWhomTheOthersWaitedFor) {
  const std::chrono::milliseconds late = patient(std::chrono::milliseconds(100));  // delays by chance are shorter
  for (const Placed& placed : kInMemory) {
    run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(placed));
      session.train(0);
      for (const int slow : {2, 0}) {
        if (mesh.rank() == slow) std::this_thread::sleep_for(late);
        const StepResult result = session.train(1);
        EXPECT_EQ(result.waited_for_rank, slow) << name_of(placed);
        EXPECT_GT(result.waited_for_seconds, 0.5 * std::chrono::duration<double>(late).count()) << name_of(placed);
        EXPECT_LT(result.waited_for_seconds, result.seconds) << name_of(placed);
      }
    });
  }
}

// Each of 24 microbatches takes one rank twice as long as the other. The ranks end at the same time if one makes 16 and
// the other makes 8.
TEST(Stragglers, RanksOfDifferentSpeedsEndTogetherWhereMicrobatchesAreDealt) {
  const std::chrono::milliseconds each = patient(std::chrono::milliseconds(10));
  set_log_level(LogLevel::kWarning);
  ::testing::internal::CaptureStderr();
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kShardGradients, [](Strategy& strategy) {
                      strategy.gradient_accumulation = 12;
                      strategy.gradient_sync = GradientSync::kLastMicrobatch;
                      strategy.deal = {.by = DealBy::kSpeed, .window = 3};
                    }));
    std::vector<double> seconds;
    for (int step = 0; step < 5; ++step) {
      while (!session.engine.step_is_due()) {
        std::this_thread::sleep_for(mesh.rank() == 1 ? 2 * each : each);
        session.engine.backward(session.loss(0));
      }
      seconds.push_back(session.engine.step().seconds);
    }
    EXPECT_LT(std::min(seconds[3], seconds[4]), 0.85 * std::min(seconds[1], seconds[2]));
    const MicrobatchRun run = session.engine.microbatches();
    EXPECT_EQ(run.end - run.begin > 12, mesh.rank() == 0) << run.begin << " to " << run.end;
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("the program has not asked which are this rank's"));
}

// No rank waits for ranks of another replica between two outer steps.
TEST(Stragglers, ReplicaThatTrainsApartTellsWhichOfItsRanksItWaitedFor) {
  const std::chrono::milliseconds late = patient(std::chrono::milliseconds(100));
  run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
    strategy.mesh = {2, 2};
    strategy.sync.type = SyncType::kLocalSgd;
    strategy.sync.every = 100;
    Session session(mesh, strategy);
    session.train(0);
    const int slow = mesh.rank() < 2 ? 1 : 2;
    if (mesh.rank() == slow) std::this_thread::sleep_for(late);
    EXPECT_EQ(session.train(1).waited_for_rank, slow);
  });
}

}  // namespace stragglers_test
}  // namespace tessera::testing
