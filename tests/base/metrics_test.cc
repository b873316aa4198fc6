// Tests the writer of metrics (one JSON object per line) and the percentiles of step times.

#include "runtime/base/metrics/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "runtime/base/status.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

class MetricsWriterTest : public ::testing::Test {
 protected:
  MetricsWriterTest()
      : path_(std::filesystem::path(::testing::TempDir()) / (std::to_string(::getpid()) + "-metrics.jsonl")) {}
  ~MetricsWriterTest() override { std::filesystem::remove(path_); }

  MetricsWriter open() {
    auto writer = MetricsWriter::open(path_);
    EXPECT_TRUE(writer.ok()) << writer.status();
    return *std::move(writer);
  }
  std::string content() const {
    std::ifstream file(path_);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  std::filesystem::path path_;
};

TEST_F(MetricsWriterTest, WritesOneObjectALineInTheOrderGiven) {
  MetricsWriter writer = open();
  EXPECT_TRUE(writer.write({{"step", 12}, {"loss", 2.25}, {"overflow", false}, {"note", "a\"b\nc"}}).ok());
  EXPECT_EQ(content(), "{\"step\":12,\"loss\":2.25,\"overflow\":false,\"note\":\"a\\\"b\\nc\"}\n") << "not flushed?";
  EXPECT_TRUE(writer.write({}).ok());
  EXPECT_TRUE(writer.close().ok());
  EXPECT_THAT(content(), ::testing::EndsWith("\n{}\n"));
}

TEST_F(MetricsWriterTest, NumbersReadBackToTheSameBits) {
  MetricsWriter writer = open();
  const std::int64_t big = std::numeric_limits<std::int64_t>::max();
  const double third = 1.0 / 3, tiny = std::numeric_limits<double>::denorm_min();
  ASSERT_TRUE(writer.write({{"big", big}, {"third", third}, {"tiny", tiny}}).ok());
  const auto line = nlohmann::json::parse(content());
  EXPECT_EQ(line["big"].get<std::int64_t>(), big);
  EXPECT_EQ(line["third"].get<double>(), third);
  EXPECT_EQ(line["tiny"].get<double>(), tiny);
}

TEST_F(MetricsWriterTest, NonFiniteNumbersBecomeNullAndBadUtf8IsReplaced) {
  MetricsWriter writer = open();
  ASSERT_TRUE(writer.write({{"nan", std::nan("")}, {"inf", HUGE_VAL}, {"text", "\xFF"}}).ok());
  EXPECT_EQ(content(), "{\"nan\":null,\"inf\":null,\"text\":\"\xEF\xBF\xBD\"}\n");
}

TEST_F(MetricsWriterTest, AppendingEndsTheLineThatACrashCut) {
  { std::ofstream(path_) << "{\"step\":1}\n{\"step\":2,\"lo"; }
  ASSERT_TRUE(open().write({{"step", 3}}).ok());
  EXPECT_EQ(content(), "{\"step\":1}\n{\"step\":2,\"lo\n{\"step\":3}\n");
  ASSERT_TRUE(open().write({{"step", 4}}).ok());
  EXPECT_THAT(content(), ::testing::EndsWith("{\"step\":3}\n{\"step\":4}\n"));
}

TEST_F(MetricsWriterTest, EmptyAndRepeatedNamesAreRefused) {
  MetricsWriter writer = open();
  EXPECT_EQ(exit_code_of(writer.write({{"a", 1}, {"a", 2}})), ExitCode::kUsage);
  EXPECT_EQ(exit_code_of(writer.write({{"", 1}})), ExitCode::kUsage);
  EXPECT_EQ(content(), "");
}

TEST_F(MetricsWriterTest, ErrorsNamePathAndErrno) {
  const auto missing = MetricsWriter::open("/nonexistent/metrics.jsonl");
  EXPECT_EQ(exit_code_of(missing.status()), ExitCode::kCannotCreate);
  EXPECT_THAT(message_of(missing.status()), HasSubstr("/nonexistent/metrics.jsonl"));
  EXPECT_THAT(message_of(missing.status()), HasSubstr("(errno 2)"));

  auto full = MetricsWriter::open("/dev/full");
  ASSERT_TRUE(full.ok()) << full.status();
  const absl::Status status = full->write({{"step", 1}});
  EXPECT_EQ(exit_code_of(status), ExitCode::kIo);
  EXPECT_THAT(message_of(status), HasSubstr("No space left on device (errno 28)"));
}

TEST_F(MetricsWriterTest, WritesAfterCloseOrMoveFail) {
  MetricsWriter writer = open();
  MetricsWriter moved = std::move(writer);
  EXPECT_FALSE(writer.write({{"a", 1}}).ok());  // NOLINT(bugprone-use-after-move): the test needs it
  EXPECT_TRUE(moved.write({{"a", 1}}).ok());
  EXPECT_TRUE(moved.close().ok());
  EXPECT_FALSE(moved.write({{"a", 1}}).ok());
  EXPECT_EQ(content(), "{\"a\":1}\n");
}

// The file may grow only to 15 bytes, so the second line is cut. The limit belongs to a process, so a child process
// reaches it.
TEST_F(MetricsWriterTest, LineCutByAFileLimitSpoilsNoOther) {
  const pid_t child = ::fork();
  if (child == 0) {
    MetricsWriter writer = open();
    const rlimit small{15, RLIM_INFINITY}, none{RLIM_INFINITY, RLIM_INFINITY};
    bool right = ::setrlimit(RLIMIT_FSIZE, &small) == 0 && writer.write({{"step", 1}}).ok();
    const absl::Status cut = writer.write({{"step", 2}});
    right = right && exit_code_of(cut) == ExitCode::kIo && message_of(cut).find("(errno 27)") != std::string::npos;
    right = right && ::setrlimit(RLIMIT_FSIZE, &none) == 0 && writer.write({{"step", 3}}).ok();
    std::_Exit(right ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(content(), "{\"step\":1}\n{\"st\n{\"step\":3}\n");
}

TEST_F(MetricsWriterTest, LinesOfSeveralProcessesStayWhole) {
  constexpr int kProcesses = 4, kLines = 300;
  const std::string padding(200, 'x');
  for (int process = 0; process < kProcesses; ++process) {
    if (::fork() != 0) continue;
    MetricsWriter writer = open();
    for (int i = 0; i < kLines; ++i) (void)writer.write({{"process", process}, {"padding", padding}});
    std::_Exit(0);
  }
  for (int process = 0; process < kProcesses; ++process) ::wait(nullptr);
  std::istringstream lines(content());
  std::vector<int> counts(kProcesses, 0);
  for (std::string line; std::getline(lines, line);)
    ++counts.at(nlohmann::json::parse(line)["process"].get<std::size_t>());
  EXPECT_THAT(counts, ::testing::Each(kLines));
}

TEST(StepTimes, EmptyHasNoPercentiles) {
  EXPECT_TRUE(std::isnan(StepTimes().p50()));
  EXPECT_EQ(StepTimes().count(), 0u);
}

TEST(StepTimes, PercentilesOf1To100AreTheNearestRanks) {
  StepTimes times;
  for (int i = 100; i >= 1; --i) times.add(i);
  EXPECT_EQ(times.p50(), 50);
  EXPECT_EQ(times.p95(), 95);
  EXPECT_EQ(times.percentile(100), 100);
  EXPECT_EQ(times.percentile(0.1), 1);
}

TEST(StepTimes, PercentilesEqualSortingTheWindow) {
  std::mt19937 random(3);
  for (const std::size_t window : {1u, 2u, 7u, 100u}) {
    StepTimes times(window);
    std::vector<double> all;
    for (int i = 0; i < 250; ++i) {
      all.push_back(static_cast<double>(random() % 1000));
      times.add(all.back());
      std::vector<double> last(all.end() - static_cast<std::ptrdiff_t>(std::min(all.size(), window)), all.end());
      std::sort(last.begin(), last.end());
      const std::size_t rank = (95 * last.size() + 99) / 100;
      ASSERT_EQ(times.p95(), last[rank - 1]) << "window " << window << ", after " << i;
      ASSERT_EQ(times.count(), last.size());
    }
  }
}

}  // namespace
}  // namespace tessera
