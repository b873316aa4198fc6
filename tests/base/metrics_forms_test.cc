// Tests metrics that MetricsWriter writes as tables and as event files.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "runtime/base/metrics/metrics.h"
#include "runtime/base/status.h"
#include "tests/support/test_folder.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;
using Start = MetricsWriter::Start;

class MetricsForms : public ::testing::Test {
 protected:
  MetricsWriter open(MetricsFormat format, Start start = Start::kAppend, std::vector<std::string> columns = {}) const {
    auto writer = MetricsWriter::open(path_, {start, format, std::move(columns)});
    EXPECT_TRUE(writer.ok()) << writer.status();
    return *std::move(writer);
  }
  absl::Status error_of_table(std::vector<std::string> columns) const {
    return MetricsWriter::open(path_, {Start::kAppend, MetricsFormat::kCsv, std::move(columns)}).status();
  }
  std::string content() const { return TestFolder::content_of(path_); }

  const TestFolder folder_;
  const std::filesystem::path path_ = folder_ / "metrics";
};

TEST_F(MetricsForms, FormatIsChosenByTheFileNamesEnding) {
  EXPECT_EQ(metrics_format_of("runs/a/metrics.csv"), MetricsFormat::kCsv);
  EXPECT_EQ(metrics_format_of("runs/a/metrics.jsonl"), MetricsFormat::kJsonLines);
  EXPECT_EQ(metrics_format_of("runs.csv/metrics"), MetricsFormat::kJsonLines);
}

TEST_F(MetricsForms, CsvColumnsAreTheFirstRowsNames) {
  MetricsWriter writer = open(MetricsFormat::kCsv);
  EXPECT_EQ(content(), "");
  ASSERT_TRUE(writer.write({{"step", 1}, {"loss", 0.1}, {"overflow", false}, {"note", "a, \"b\"\nc"}}).ok());
  EXPECT_EQ(content(), "step,loss,overflow,note\n1,0.1,false,\"a, \"\"b\"\"\nc\"\n") << "not flushed?";
  ASSERT_TRUE(writer.write({{"loss", std::nan("")}, {"step", 2}}).ok());
  ASSERT_TRUE(writer.write({{"step", 3}, {"loss", -HUGE_VAL}}).ok());
  EXPECT_THAT(content(), ::testing::EndsWith("\n2,nan,,\n3,-inf,,\n"));
  const absl::Status other = writer.write({{"step", 4}, {"accuracy", 0.5}});
  EXPECT_EQ(exit_code_of(other), ExitCode::kUsage);
  EXPECT_THAT(message_of(other), HasSubstr("has no column \"accuracy\""));
  EXPECT_THAT(content(), ::testing::EndsWith("\n3,-inf,,\n"));
}

TEST_F(MetricsForms, CsvNumbersReadBackToTheSameBits) {
  MetricsWriter writer = open(MetricsFormat::kCsv, Start::kNew, {"a", "b", "c"});
  EXPECT_EQ(content(), "a,b,c\n") << "columns that are known are there at once";
  const double third = 1.0 / 3, tiny = std::numeric_limits<double>::denorm_min();
  ASSERT_TRUE(writer.write({{"a", third}, {"b", tiny}, {"c", std::numeric_limits<std::int64_t>::max()}}).ok());
  double a = 0, b = 0;
  long long c = 0;
  ASSERT_EQ(std::sscanf(content().c_str(), "a,b,c\n%lf,%lf,%lld", &a, &b, &c), 3);
  EXPECT_EQ(a, third);
  EXPECT_EQ(b, tiny);
  EXPECT_EQ(c, std::numeric_limits<long long>::max());
}

TEST_F(MetricsForms, AppendingToCsvContinuesAfterTheLastWholeRow) {
  folder_.write("metrics", "step,\"a \"\"b\"\"\"\n1,0.5\n2,0.2");
  ASSERT_TRUE(open(MetricsFormat::kCsv).write({{"a \"b\"", 0.75}, {"step", 2}}).ok());
  ASSERT_TRUE(open(MetricsFormat::kCsv, Start::kAppend, {"step", "a \"b\""}).write({{"step", 3}}).ok());
  EXPECT_EQ(content(), "step,\"a \"\"b\"\"\"\n1,0.5\n2,0.75\n3,\n");
  const absl::Status other = error_of_table({"step", "loss"});
  EXPECT_EQ(exit_code_of(other), ExitCode::kCannotCreate);
  EXPECT_THAT(message_of(other), HasSubstr("those of this run step, loss. [T0423] hint: give the table another name"));
  EXPECT_THAT(message_of(other), HasSubstr(path_.string()));
  const absl::Status fewer_of_both = error_of_table({"a \"b\"", "loss"});
  EXPECT_EQ(exit_code_of(fewer_of_both), ExitCode::kCannotCreate) << fewer_of_both;
  folder_.write("metrics", "ste");  // a run ended while it wrote the names of the columns
  ASSERT_TRUE(open(MetricsFormat::kCsv).write({{"step", 1}}).ok());
  EXPECT_EQ(content(), "step\n1\n");
}

TEST_F(MetricsForms, CsvOfAnotherVersionKeepsItsColumns) {
  folder_.write("metrics", "step,loss\n1,0.5\n");
  MetricsWriter later = open(MetricsFormat::kCsv, Start::kAppend, {"step", "noise", "loss"});
  ASSERT_TRUE(later.write({{"step", 2}, {"noise", 3.5}, {"loss", 0.25}}).ok());
  MetricsWriter earlier = open(MetricsFormat::kCsv, Start::kAppend, {"step"});
  ASSERT_TRUE(earlier.write({{"step", 3}}).ok());
  EXPECT_EQ(content(), "step,loss\n1,0.5\n2,0.25\n3,\n");
  EXPECT_EQ(exit_code_of(later.write({{"step", 4}, {"unknown", 1}})), ExitCode::kUsage);
}

TEST_F(MetricsForms, EventFileBeginsWithItsVersionRecord) {
  MetricsWriter writer = open(MetricsFormat::kEvents, Start::kNew);
  const std::string beginning = content();
  // The bytes are the length 24 and its CRC, field 1 (wall_time) with 8 bytes, and field 3 (file_version) with 13
  // bytes.
  EXPECT_EQ(beginning.substr(0, 8), std::string("\x18\0\0\0\0\0\0\0", 8));
  EXPECT_EQ(beginning[12], '\x09');
  EXPECT_EQ(beginning.substr(21, 15),
            "\x1A\x0D"
            "brain.Event:2");
  EXPECT_EQ(beginning.size(), 8u + 4 + 24 + 4);
  EXPECT_EQ(exit_code_of(MetricsWriter::open(path_, {Start::kAppend, MetricsFormat::kEvents}).status()),
            ExitCode::kCannotCreate);
  ASSERT_TRUE(writer.write({{"step", 300}, {"loss", 0.5}, {"note", "words are left out"}}).ok());
  // Field 2 (step) is 300; field 5 (summary) has a value with the tag "loss" and the float 0.5.
  EXPECT_THAT(content().substr(beginning.size() + 12 + 9),
              StartsWith(std::string("\x10\xAC\x02\x2A\x0D\x0A\x0B\x0A\x04loss\x15\0\0\0\x3F", 18)));
  EXPECT_NE(event_file_name(), event_file_name());
}

// A file may grow only up to a limit. A row that is cut short is removed, so that the file is whole. The limit belongs
// to a process, so a child process reaches it.
TEST_F(MetricsForms, RowCutByAFileLimitIsRemoved) {
  for (const MetricsFormat format : {MetricsFormat::kCsv, MetricsFormat::kEvents}) {
    std::filesystem::remove(path_);
    MetricsWriter writer = open(format, Start::kNew);
    ASSERT_TRUE(writer.write({{"step", 1}, {"loss", 0.125}}).ok());
    const std::string whole = content();
    const pid_t child = ::fork();
    if (child == 0) {
      const rlimit small{whole.size() + 5, RLIM_INFINITY}, none{RLIM_INFINITY, RLIM_INFINITY};
      bool right = ::setrlimit(RLIMIT_FSIZE, &small) == 0;
      right = right && exit_code_of(writer.write({{"step", 2}, {"loss", 0.25}})) == ExitCode::kIo && content() == whole;
      right = right && ::setrlimit(RLIMIT_FSIZE, &none) == 0 && writer.write({{"step", 3}, {"loss", 0.25}}).ok();
      ::_exit(right ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(content().substr(0, whole.size()), whole);
    EXPECT_GT(content().size(), whole.size());
  }
}

}  // namespace
}  // namespace tessera
