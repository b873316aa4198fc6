// Tests the simulation of a step whose ranks also compute microbatches of slower ranks.

#include "planner/modes/backup_clock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "sharding/layout/plan/microbatch_deal.h"

namespace tessera::testing {
namespace {

MicrobatchOrder order_of_runs(const std::vector<std::int64_t>& counts, std::int64_t backups) {
  MicrobatchOrder order{static_cast<int>(counts.size()), 1, /*has_runs=*/true};
  order.total = 0;
  for (const std::int64_t count : counts) {
    order.begins.push_back(order.total);
    order.total += count;
  }
  order.longest = order.total;
  order.backups = backups;
  return order;
}

TEST(BackupClock, ARankThatStandsStillIsLeftWhatOthersMayNotMake) {
  const BackupRank quick{.forward_s = 1, .backward_s = 1}, still{.first_s = 100, .forward_s = 1, .backward_s = 1};
  const BackupStep none = play_backups(order_of_runs({4, 4}, 0), std::vector{quick, still});
  EXPECT_EQ(none.ends_s, (std::vector<double>{8, 108}));
  EXPECT_EQ(none.made_again, 0);
  const BackupStep two = play_backups(order_of_runs({4, 4}, 2), std::vector{quick, still});
  EXPECT_EQ(two.ends_s, (std::vector<double>{12, 104}));
  EXPECT_EQ(two.made_again, 2);
  EXPECT_EQ(two.twice, 0);
}

TEST(BackupClock, AMicrobatchThatIsMadeMeanwhileIsLeftAfterItsForward) {
  const BackupRank quick{.forward_s = 1, .backward_s = 1}, slow{.forward_s = 50, .backward_s = 70};
  const BackupStep step = play_backups(order_of_runs({3, 3}, 3), std::vector{quick, slow});
  EXPECT_EQ(step.ends_s, (std::vector<double>{12, 50}));
  EXPECT_EQ(step.made_again, 3);
  EXPECT_EQ(step.twice, 1);
}

TEST(BackupClock, RanksThatAreAlikeLeaveEachOtherAlone) {
  const std::vector<BackupRank> alike(5, {.forward_s = 1, .backward_s = 2});
  const BackupStep step = play_backups(order_of_runs({6, 6, 6, 6, 6}, 4), alike);
  EXPECT_EQ(step.ends_s, std::vector<double>(5, 18));
  EXPECT_EQ(step.made_again + step.twice, 0);
}

/// Simulates a step second by second. In each second, every rank, in the order of their numbers, checks whether its
/// forward or backward has ended. All times are whole seconds, and above 0.
class BySeconds {
 public:
  BySeconds(const MicrobatchOrder& order, const std::vector<BackupRank>& speeds)
      : order_(order), speeds_(speeds), ranks_(speeds.size()) {}

  BackupStep play() {
    BackupStep step;
    step.ends_s.resize(ranks_.size(), -1);
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].begin = order_.run_of(static_cast<int>(r)).begin;
      ranks_[r].end = order_.run_of(static_cast<int>(r)).end;
      start(r, ranks_[r].begin, speeds_[r].first_s);
    }
    for (double now = 0; std::ranges::count(step.ends_s, -1) > 0; ++now) {
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        if (step.ends_s[r] < 0 && ranks_[r].until == now && !goes_on(r, now)) step.ends_s[r] = now;
      }
    }
    for (const auto& [microbatch, first] : makers_)
      step.made_again += first != static_cast<std::size_t>(order_.owner_of(microbatch)) ? 1 : 0;
    for (const auto& [microbatch, ranks] : begun_) step.twice += ranks.size() > 1 ? 1 : 0;
    return step;
  }

 private:
  struct One {
    std::int64_t begin = 0, end = 0, at = 0;  ///< the rank's run, and the microbatch under way
    bool is_forward = true;
    double until = 0;
    std::int64_t ended = 0, computed = 0, claims = 0;
    std::int64_t claimed = 0;        ///< microbatches from the end of its run that were claimed
    std::int64_t known_claimed = 0;  ///< the value of `claimed` when the rank last completed a microbatch of its run
  };

  void start(std::size_t r, std::int64_t microbatch, double now) {
    begun_[microbatch].insert(r);
    ranks_[r].at = microbatch;
    ranks_[r].is_forward = true;
    ranks_[r].until = now + speeds_[r].forward_s;
  }
  bool is_own(std::size_t r) const { return ranks_[r].at >= ranks_[r].begin && ranks_[r].at < ranks_[r].end; }

  /// Begins the pass that follows the pass that has ended. Returns false if the rank has nothing more to compute.
  bool goes_on(std::size_t r, double now) {
    One& one = ranks_[r];
    const bool is_late = makers_.contains(one.at);
    if (one.is_forward && !is_late) {
      one.is_forward = false;
      one.until = now + speeds_[r].backward_s;
      return true;
    }
    ++one.computed;
    const bool has_run = is_own(r) && !is_late;
    if (!one.is_forward) {
      if (is_own(r)) ++one.ended, one.known_claimed = one.claimed;
      makers_.try_emplace(one.at, r);
    }
    const std::int64_t following = one.at + 1;
    const bool is_left =
        following < one.end && (following < one.end - one.known_claimed || !makers_.contains(following));
    if (has_run && is_left) {
      start(r, following, now);
      return true;
    }
    for (const auto slow = [&] { return slowest(r); }; one.claims < order_.backups && slow();) {
      One& other = ranks_[*slow()];
      const std::int64_t taken = other.end - ++other.claimed;
      if (taken < other.begin + other.ended) continue;
      ++one.claims;
      start(r, taken, now);
      return true;
    }
    return false;
  }

  std::optional<std::size_t> slowest(std::size_t self) const {
    std::optional<std::size_t> found;
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      if (r == self || open(r) <= 0 || left(r) <= 1.5 / static_cast<double>(ranks_[self].computed)) continue;
      if (!found || left(r) > left(*found)) found = r;
    }
    return found;
  }
  std::int64_t open(std::size_t r) const {
    return ranks_[r].end - ranks_[r].begin - ranks_[r].ended - ranks_[r].claimed;
  }
  double left(std::size_t r) const {
    return (static_cast<double>(open(r)) - 0.5) / static_cast<double>(std::max<std::int64_t>(ranks_[r].ended, 1));
  }

  const MicrobatchOrder& order_;
  const std::vector<BackupRank>& speeds_;
  std::vector<One> ranks_;
  std::map<std::int64_t, std::size_t> makers_;           ///< [microbatch]: the rank that has ended it first
  std::map<std::int64_t, std::set<std::size_t>> begun_;  ///< [microbatch]: the ranks that have begun it
};

TEST(BackupClock, RandomStepsAreThoseThatArePlayedSecondBySecond) {
  std::mt19937_64 random(54);
  const auto draw = [&](std::int64_t from, std::int64_t to) {
    return from + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(to - from + 1));
  };
  std::int64_t made_again = 0, twice = 0;
  for (int i = 0; i < 4000; ++i) {
    std::vector<std::int64_t> counts;
    std::vector<BackupRank> ranks;
    for (std::int64_t rank = draw(2, 4); rank > 0; --rank) {
      counts.push_back(draw(1, 5));
      const double still = draw(0, 3) == 0 ? static_cast<double>(draw(1, 60)) : 0.0;
      ranks.push_back({still, static_cast<double>(draw(1, 6)), static_cast<double>(draw(1, 9))});
    }
    const MicrobatchOrder order = order_of_runs(counts, draw(0, 4));
    const BackupStep wanted = BySeconds(order, ranks).play(), got = play_backups(order, ranks);
    ASSERT_EQ(got.ends_s, wanted.ends_s) << i;
    ASSERT_EQ(got.made_again, wanted.made_again) << i;
    ASSERT_EQ(got.twice, wanted.twice) << i;
    made_again += got.made_again;
    twice += got.twice;
  }
  EXPECT_GT(made_again, 1000);
  EXPECT_GT(twice, 100);
}

}  // namespace
}  // namespace tessera::testing
