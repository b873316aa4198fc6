// Tests the schedule of unit uses, which decides which units are prefetched and released. It is also compared with a
// slow second implementation.

#include "sharding/layout/schedule.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace tessera {
namespace {

using ::testing::ElementsAre;

constexpr int kUnits = 10;

void run(Schedule& schedule, std::initializer_list<int> uses) {
  for (int unit : uses) schedule.use(unit);
}

TEST(Schedule, RepeatedUsesOfAUnitAreRecordedOnce) {
  Schedule schedule(kUnits, 2);
  run(schedule, {0, 1, 1, 2, 2, 2, 1, 0});
  schedule.end_round();
  EXPECT_THAT(schedule.record(), ElementsAre(0, 1, 2, 1, 0));
}

/// Returns all units that `next_missing` returns, if each of them is held before the next call.
std::vector<int> missing(Schedule& schedule) {
  std::vector<int> units;
  for (int unit = schedule.next_missing(); unit >= 0; unit = schedule.next_missing()) {
    units.push_back(unit);
    schedule.hold(unit);
  }
  for (const int unit : units) schedule.give_up(unit);
  return units;
}

TEST(Schedule, ReplayTellsMissingUnitsAndTheirDistance) {
  Schedule schedule(kUnits, 2);
  run(schedule, {0, 1, 2, 1, 0});
  schedule.end_round();
  schedule.use(0);
  EXPECT_THAT(missing(schedule), ElementsAre(1, 2));
  EXPECT_EQ(schedule.distance(1), 0u);
  EXPECT_EQ(schedule.distance(0), 3u);
  run(schedule, {1, 2});
  EXPECT_THAT(missing(schedule), ElementsAre(1, 0));
  EXPECT_EQ(schedule.distance(2), Schedule::kNever);
}

// An example is the root unit of a transformer. Its embedding is used first, and its last norm just before the head.
TEST(Schedule, UncountedUnitTakesNoPlaceInTheLookahead) {
  Schedule schedule(kUnits, 1, /*uncounted=*/0);
  run(schedule, {0, 1, 2, 0, 3, 0, 2, 1, 0});
  schedule.end_round();
  EXPECT_THAT(missing(schedule), ElementsAre(0, 1));
  schedule.hold(0);
  run(schedule, {0, 1, 2});
  EXPECT_THAT(missing(schedule), ElementsAre(3));
}

TEST(Schedule, LeastRecentlyUsedCountsAsFarthestWithoutARecord) {
  Schedule schedule(kUnits, 2);
  run(schedule, {0, 1, 2});
  EXPECT_LT(schedule.distance(2), schedule.distance(1));
  EXPECT_LT(schedule.distance(1), schedule.distance(0));
  EXPECT_EQ(schedule.distance(7), Schedule::kNever);
}

TEST(Schedule, DifferentRoundIsRecordedAnew) {
  Schedule schedule(kUnits, 2);
  run(schedule, {0, 1, 2, 1, 0});
  schedule.end_round();
  run(schedule, {0, 2, 0});
  schedule.end_round();
  EXPECT_THAT(schedule.record(), ElementsAre(0, 2, 0));
}

TEST(Schedule, UnknownUseLeavesTheCursor) {
  Schedule schedule(kUnits, 2);
  run(schedule, {0, 1, 2});
  schedule.end_round();
  run(schedule, {0, 9});
  EXPECT_EQ(schedule.next_missing(), 1);
}

TEST(Schedule, GivesUpTheUnitThatIsUsedLast) {
  Schedule schedule(kUnits, 2);
  run(schedule, {0, 1, 2, 3, 2, 1, 0});
  schedule.end_round();
  run(schedule, {0, 1});
  for (const int unit : {0, 1, 2}) schedule.hold(unit);
  const auto any = [](int) { return true; };
  EXPECT_EQ(schedule.farthest_held(any), 0);
  EXPECT_EQ(schedule.farthest_held([](int unit) { return unit != 0; }), 1);
  EXPECT_EQ(schedule.farthest_held(schedule.distance(3), any), 0);
  EXPECT_EQ(schedule.farthest_held(schedule.distance(0), any), -1) << "nothing is used later than unit 0";
}

TEST(Schedule, EndlessEvaluationKeepsMemoryBoundedAndTheRecord) {
  Schedule schedule(kUnits, 2);
  const auto forward = [&] { run(schedule, {0, 1, 2, 3, 0}); };
  const auto backward = [&] { run(schedule, {0, 3, 2, 1}); };
  for (int i = 0; i < 20'000; ++i) forward();  // before anything is recorded
  EXPECT_LE(schedule.seen(), Schedule::kLongestRound);
  for (int i = 0; i < 2; ++i) {
    forward(), backward();
    schedule.end_round();
  }
  EXPECT_THAT(schedule.record(), ElementsAre(0, 1, 2, 3, 0, 3, 2, 1));
  for (int i = 0; i < 20'000; ++i) forward();
  EXPECT_LE(schedule.seen(), Schedule::kLongestRound);
  forward(), backward();
  schedule.end_round();
  EXPECT_THAT(schedule.record(), ElementsAre(0, 1, 2, 3, 0, 3, 2, 1));
}

TEST(Schedule, ShortRecordIsReplacedThoughItMatchesEachRoundsEnd) {
  Schedule schedule(kUnits, 2);
  run(schedule, {1, 0});
  schedule.end_round();
  for (int i = 0; i < 2; ++i) {
    run(schedule, {0, 1, 2, 1, 0});
    schedule.end_round();
  }
  EXPECT_THAT(schedule.record(), ElementsAre(0, 1, 2, 1, 0));
}

/// A slow Schedule that does exactly what the header says: it searches all entries one after the other.
struct SlowSchedule {
  std::vector<int> record, seen;
  std::set<int> held;
  std::size_t cursor = 0;
  bool tolerated = false;

  std::size_t find(int unit) const {
    return static_cast<std::size_t>(
        std::find(record.begin() + static_cast<std::ptrdiff_t>(cursor), record.end(), unit) - record.begin());
  }
  void use(int unit) {
    if (!seen.empty() && seen.back() == unit) return;
    seen.push_back(unit);
    if (!record.empty() && find(unit) == record.size() && record[0] == unit) cursor = 0;
    if (find(unit) < record.size()) cursor = find(unit) + 1;
  }
  void end_round() {
    if (!seen.empty() && seen != record) {
      const bool alike =
          !record.empty() && seen.size() >= record.size() && std::equal(record.rbegin(), record.rend(), seen.rbegin());
      tolerated = !tolerated && alike;
      if (!tolerated) record = seen;
    } else if (!seen.empty()) {
      tolerated = false;
    }
    seen.clear();
    cursor = 0;
  }
  std::size_t distance(int unit) const {
    if (record.empty()) {
      const auto last = std::find(seen.rbegin(), seen.rend(), unit);
      return last == seen.rend() ? Schedule::kNever : static_cast<std::size_t>(last - seen.rbegin());
    }
    return find(unit) == record.size() ? Schedule::kNever : find(unit) - cursor;
  }
  int next_missing(std::size_t ahead, int uncounted) const {
    std::set<int> distinct;
    for (std::size_t i = cursor; i < record.size() && distinct.size() < ahead; ++i) {
      if (record[i] != uncounted) distinct.insert(record[i]);
      if (!held.count(record[i])) return record[i];
    }
    return -1;
  }
  int farthest_held(std::optional<std::size_t> later_than, int pinned) const {
    int best = -1;
    for (const int unit : held) {
      if (unit == pinned || (later_than && distance(unit) <= *later_than)) continue;
      if (best < 0 || distance(unit) > distance(best)) best = unit;
    }
    return best;
  }
};

/// Makes a sequence of random calls on both schedules, and compares all answers after each call.
void expect_equals_slow(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int units = 1 + below(9);
  const auto ahead = static_cast<std::size_t>(below(units + 2));
  const int uncounted = below(3) - 1;
  Schedule schedule(units, ahead, uncounted);
  SlowSchedule slow;
  std::vector<int> habit;  // order of units in most rounds
  for (int i = 0; i < 1 + below(12); ++i) habit.push_back(below(units));
  std::size_t at = 0;
  for (int call = 0; call < 400; ++call) {
    const int kind = below(20), unit = below(units);
    if (kind < 12 && at < habit.size()) {
      schedule.use(habit[at]), slow.use(habit[at]), ++at;
    } else if (kind < 13) {
      schedule.use(unit), slow.use(unit);
    } else if (kind < 15 && at >= habit.size()) {
      schedule.end_round(), slow.end_round();
      at = 0;
    } else if (kind < 16 && below(8) == 0) {
      schedule.end_round(), slow.end_round();
      at = static_cast<std::size_t>(below(3));
    } else if (kind < 18) {
      schedule.hold(unit), slow.held.insert(unit);
    } else {
      schedule.give_up(unit), slow.held.erase(unit);
    }
    ASSERT_EQ(std::vector<int>(schedule.record().begin(), schedule.record().end()), slow.record);
    for (int each = 0; each < units; ++each) ASSERT_EQ(schedule.distance(each), slow.distance(each)) << each;
    ASSERT_EQ(schedule.next_missing(), slow.next_missing(ahead, uncounted));
    const int pinned = below(units);
    const auto may_go = [&](int each) { return each != pinned; };
    ASSERT_EQ(schedule.farthest_held(may_go), slow.farthest_held(std::nullopt, pinned));
    const std::size_t limit = slow.distance(unit);
    ASSERT_EQ(schedule.farthest_held(limit, may_go), slow.farthest_held(limit, pinned));
  }
}

TEST(Schedule, RandomCallsEqualASlowReference) {
  for (unsigned seed = 0; seed < 2000 && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    expect_equals_slow(seed);
  }
}

}  // namespace
}  // namespace tessera
