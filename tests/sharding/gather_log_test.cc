// Tests the log of a step's gathers and guards.

#include "sharding/gather/gather_log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace tessera::testing {
namespace {

std::vector<int> entries_of(const GatherLog& log) { return {log.entries().begin(), log.entries().end()}; }

TEST(GatherLog, GathersAndGuardsAreKeptInOrder) {
  GatherLog log(2);
  log.note_gather(3);
  log.note_guard(0);
  log.note_gather(3);
  log.note_guard(3);
  EXPECT_EQ(entries_of(log), (std::vector<int>{3, GatherLog::guard_code(0), 3, GatherLog::guard_code(3)}));
}

TEST(GatherLog, GuardCodesAreNoUnitNumbersAndConvertBack) {
  for (const int unit : {0, 1, 7, 100000}) {
    EXPECT_LT(GatherLog::guard_code(unit), -1) << "-1 stands for the end of an order";
    EXPECT_EQ(GatherLog::guard_code(GatherLog::guard_code(unit)), unit);
  }
}

TEST(GatherLog, UseIsNotedOnlyIfTheUnitWasNotUsedRecently) {
  GatherLog log(2);
  for (const int unit : {1, 1, 2, 1, 2}) log.note_use(unit);
  EXPECT_EQ(entries_of(log), (std::vector<int>{1, 2})) << "both are at hand";
  log.note_use(1);
  log.note_use(3);  // this entry replaces 2, whose last use is the oldest
  log.note_use(1);
  EXPECT_EQ(entries_of(log), (std::vector<int>{1, 2, 3}));
  log.note_use(2);
  log.note_use(3);
  EXPECT_EQ(entries_of(log), (std::vector<int>{1, 2, 3, 2, 3}));
}

// The root has its own slot, so it displaces no other unit and no other unit displaces it.
TEST(GatherLog, RootIsNotedOncePerStep) {
  GatherLog log(2);
  for (const int unit : {0, 1, 0, 2, 0, 3, 0, 1}) log.note_use(unit);
  EXPECT_EQ(entries_of(log), (std::vector<int>{0, 1, 2, 3, 1}));
  log.reset();
  log.note_use(0);
  EXPECT_EQ(entries_of(log), std::vector<int>{0});
}

TEST(GatherLog, ResetForgetsTheStep) {
  GatherLog log(3);
  log.note_gather(1);
  log.note_use(2);
  log.reset();
  EXPECT_TRUE(log.entries().empty());
  log.note_use(2);
  EXPECT_EQ(entries_of(log), std::vector<int>{2}) << "nothing is at hand any more";
}

// An evaluation may be endless. The number of entries alone decides which entries are dropped, so the choice is the
// same on every rank.
TEST(GatherLog, LongStepKeepsOnlyItsLastEntries) {
  constexpr std::size_t kMost = std::size_t{1} << 16, kCount = 5 * kMost + 1234;
  GatherLog log(1);
  for (std::size_t i = 0; i < kCount; ++i) {
    log.note_gather(static_cast<int>(i));
    ASSERT_LE(log.entries().size(), kMost);
  }
  const std::vector<int> kept = entries_of(log);
  EXPECT_GE(kept.size(), kMost / 2);
  EXPECT_EQ(kept.back(), static_cast<int>(kCount) - 1);
  const auto gap = [](int a, int b) { return b != a + 1; };
  EXPECT_EQ(std::adjacent_find(kept.begin(), kept.end(), gap), kept.end()) << "nothing is missing in between";
}

}  // namespace
}  // namespace tessera::testing
