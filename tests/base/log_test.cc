// Tests log lines: their parts, levels, ranks of threads, and the variable that sets the level.

#include "runtime/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <sstream>
#include <thread>
#include <vector>

#include "tests/support/stderr_of.h"

namespace tessera {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::stderr_of;

TEST(Log, LineHasTimeLevelRankAndMessage) {
  const std::string text = stderr_of([] {
    set_log_rank(3, 8);
    log_warning("disk {} is 90% full");
  });
  EXPECT_THAT(text, ContainsRegex("^[0-9:]{8}\\.[0-9]{3} warning \\[rank 3/8\\] disk \\{\\} is 90% full\n$"));
}

TEST(Log, LoneRankHasNoPrefix) {
  EXPECT_THAT(stderr_of([] { log_error("x {} y"); }), ContainsRegex("error   x \\{\\} y\n$"));
}

TEST(Log, QuietLevelsHideLessImportantLines) {
  const auto all = [] {
    log_info("one");
    log_warning("two");
    log_error("three");
  };
  EXPECT_THAT(stderr_of(all), HasSubstr("one"));
  const std::string quiet = stderr_of([&] {
    set_log_quiet();
    all();
  });
  EXPECT_THAT(quiet, Not(HasSubstr("one")));
  EXPECT_THAT(quiet, HasSubstr("two"));
  EXPECT_EQ(stderr_of([&] {
              set_log_level(LogLevel::kOff);
              set_log_quiet();
              all();
            }),
            "")
      << "quiet made it talk";
}

TEST(Log, LinesOfManyThreadsStayWholeWithTheirOwnRank) {
  constexpr int kRanks = 8, kLines = 200;
  const std::string text = stderr_of([] {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([rank] {
        set_log_rank(rank, kRanks);
        for (int i = 0; i < kLines; ++i) log_info("I am " + std::to_string(rank));
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
  std::istringstream lines(text);
  int count = 0;
  for (std::string line; std::getline(lines, line); ++count) {
    const auto at = line.find("[rank ");
    ASSERT_NE(at, std::string::npos) << line;
    const std::string rank = line.substr(at + 6, 1);
    EXPECT_EQ(line.substr(at), "[rank " + rank + "/8] I am " + rank);
  }
  EXPECT_EQ(count, kRanks * kLines);
}

TEST(Log, RankIsPerThreadAndCanBePassedOn) {
  set_log_rank(1, 4);
  const LogRank mine = log_rank();
  set_log_rank(0, 1);
  std::thread([&] {
    EXPECT_EQ(log_rank().world_size, 1);
    set_log_rank(mine);
    EXPECT_EQ(log_rank().rank, 1);
  }).join();
  EXPECT_EQ(log_rank().world_size, 1);
}

// A process reads the variable when it logs for the first time, so each case needs its own process.
void log_all_with(const char* level) {
  ::setenv("TESSERA_LOG_LEVEL", level, 1);
  log_info("one");
  log_warning("two");
  log_error("three");
  std::_Exit(0);
}

TEST(LogDeathTest, EnvironmentSetsTheLevel) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(log_all_with("error"), ::testing::ExitedWithCode(0), "^[^\n]* three\n$");
  EXPECT_EXIT(log_all_with("off"), ::testing::ExitedWithCode(0), "^$");
  EXPECT_EXIT(log_all_with("eror"), ::testing::ExitedWithCode(0),
              "TESSERA_LOG_LEVEL: \"eror\" is not a level; levels are info, warning, error, off. \\[T0426\\] hint: did "
              "you mean \"error\"\\?\n.*one\n.*two\n.*three\n");
}

}  // namespace
}  // namespace tessera
