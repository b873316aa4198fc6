#include "sharding/layout/schedule.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;

void run(Schedule& schedule, std::initializer_list<int> uses) {
  for (int unit : uses) schedule.use(unit);
}

TEST(Schedule, RecordsRunsOfUsesOnce) {
  Schedule schedule;
  run(schedule, {0, 1, 1, 2, 2, 2, 1, 0});
  schedule.end_round();
  EXPECT_EQ(schedule.record(), (std::vector<int>{0, 1, 2, 1, 0}));
}

TEST(Schedule, TellsWhatComesNext) {
  Schedule schedule;
  run(schedule, {0, 1, 2, 1, 0});
  schedule.end_round();
  schedule.use(0);
  EXPECT_THAT(schedule.upcoming(2), ElementsAre(1, 2));
  EXPECT_EQ(schedule.distance(1), 0u);
  EXPECT_EQ(schedule.distance(0), 3u);
  run(schedule, {1, 2});
  EXPECT_THAT(schedule.upcoming(5), ElementsAre(1, 0));
  EXPECT_EQ(schedule.distance(2), Schedule::kNever);
}

TEST(Schedule, LeastRecentlyUsedIsFarthestBeforeARecordExists) {
  Schedule schedule;
  run(schedule, {0, 1, 2});
  EXPECT_LT(schedule.distance(2), schedule.distance(1));
  EXPECT_LT(schedule.distance(1), schedule.distance(0));
  EXPECT_EQ(schedule.distance(7), Schedule::kNever);
}

TEST(Schedule, ADifferentRoundIsRecordedAnew) {
  Schedule schedule;
  run(schedule, {0, 1, 2, 1, 0});
  schedule.end_round();
  run(schedule, {0, 2, 0});
  schedule.end_round();
  EXPECT_EQ(schedule.record(), (std::vector<int>{0, 2, 0}));
}

TEST(Schedule, AnUnknownUseLeavesTheCursor) {
  Schedule schedule;
  run(schedule, {0, 1, 2});
  schedule.end_round();
  run(schedule, {0, 9});
  EXPECT_THAT(schedule.upcoming(1), ElementsAre(1));
}

}  // namespace
}  // namespace tessera
