// Tests how a rank finds the faster way to write its mailboxes: into its cache, or past the caches.

#include "runtime/comm/shared/mailbox_way.h"

#include <gtest/gtest.h>

#include <vector>

namespace tessera {
namespace {

constexpr std::size_t kRounds = 12;

/// A rank whose rounds take the time that a test chooses, depending on how they are written.
class Rank {
 public:
  /// Makes a call and returns how its rounds were written. `disturbed` is the round that takes ten times as long. If
  /// `short_end` is true, the last round takes no time.
  std::vector<bool> call(int kept, int streamed, std::size_t rounds = kRounds, std::size_t disturbed = kRounds,
                         bool short_end = false) {
    const auto cost = [&](std::size_t round) {
      return short_end && round + 1 == rounds ? 0 : way_.streams(round) ? streamed : kept;
    };
    way_.begin(rounds);
    std::vector<bool> streams;
    for (std::size_t round = 0; round < rounds; ++round) {
      streams.push_back(way_.streams(round));
      if (round + 1 == rounds) break;
      now_ += std::chrono::microseconds((cost(round) + cost(round + 1)) * (round == disturbed ? 10 : 1));
      way_.passed(round, now_);
    }
    return streams;
  }
  /// Returns whether the last round of a call is written past the caches. The calls before it have tried both ways.
  bool streams_after(int kept, int streamed) {
    for (int call = 0; call < 7; ++call) this->call(kept, streamed);
    return this->call(kept, streamed).back();
  }

 private:
  MailboxWay way_;
  MailboxWay::Clock::time_point now_{};
};

TEST(MailboxWayTest, FasterWayIsFoundInTheFirstCall) {
  EXPECT_FALSE(Rank().call(40, 70).back());
  EXPECT_TRUE(Rank().call(70, 40).back());
}

TEST(MailboxWayTest, OneCallInEightTriesBothWays) {
  Rank rank;
  const std::vector<bool> tried = {false, false, false, false, true, true, true, false, false, false, false, false};
  EXPECT_EQ(rank.call(40, 70), tried);
  for (int call = 1; call < 8; ++call) EXPECT_EQ(rank.call(40, 70), std::vector<bool>(kRounds, false)) << call;
  EXPECT_EQ(rank.call(40, 70), tried);
}

TEST(MailboxWayTest, ChangedSpeedsChangeTheWay) {
  Rank rank;
  rank.call(40, 70);
  EXPECT_TRUE(rank.streams_after(70, 40));
  rank.call(70, 40);
  EXPECT_FALSE(rank.streams_after(40, 70));
}

TEST(MailboxWayTest, SlightlyFasterWayIsNotTaken) {
  Rank rank;
  EXPECT_FALSE(rank.call(40, 38).back());
  for (int call = 0; call < 7; ++call) rank.call(70, 40);
  EXPECT_TRUE(rank.call(70, 40).back());
  EXPECT_TRUE(rank.streams_after(38, 40));
}

TEST(MailboxWayTest, OneSlowRoundDoesNotDecide) {
  for (std::size_t round = 0; round < kRounds; ++round) {
    EXPECT_FALSE(Rank().call(40, 70, kRounds, round).back()) << round;
    EXPECT_TRUE(Rank().call(70, 40, kRounds, round).back()) << round;
  }
}

TEST(MailboxWayTest, ShortLastRoundDoesNotDecide) {
  for (std::size_t rounds = 1; rounds <= kRounds; ++rounds) {
    Rank rank;
    rank.call(40, 60, rounds, kRounds, true);
    EXPECT_FALSE(rank.call(40, 60, 2).back()) << rounds;
  }
}

TEST(MailboxWayTest, CallsOfFewRoundsTryOnlyOneWay) {
  Rank rank;
  for (std::size_t rounds = 1; rounds <= 7; ++rounds) {
    EXPECT_EQ(rank.call(70, 40, rounds), std::vector<bool>(rounds, false));
  }
  EXPECT_TRUE(rank.call(70, 40, 8).back()) << "and do not count";
  EXPECT_EQ(rank.call(70, 40, 3), std::vector<bool>(3, true)) << "but go the way that others found";
}

}  // namespace
}  // namespace tessera
