// Tests the metrics files that a program's own training loop writes.

#include "tessera/metrics_file.h"

#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/error.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

ExitCode code_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.exit_code();
  }
  return ExitCode::kOk;
}

TEST(MetricsFile, FormatIsJsonLinesOrCsvByItsName) {
  const TestFolder folder;
  MetricsFile lines(folder / "new/lines.jsonl"), table(folder / "new/table.csv");
  for (MetricsFile* file : {&lines, &table}) {
    file->write(1, {{"loss", 0.5}, {"accuracy", 0.25}});
    file->write(2, {{"loss", 0.25}});
  }
  EXPECT_EQ(folder.read("new/lines.jsonl"),
            "{\"step\":1,\"loss\":0.5,\"accuracy\":0.25}\n{\"step\":2,\"loss\":0.25}\n");
  EXPECT_EQ(folder.read("new/table.csv"), "step,loss,accuracy\n1,0.5,0.25\n2,0.25,\n");
  EXPECT_THAT(usage_error_of([&] { table.write(3, {{"error", 1.0}}); }), HasSubstr("has no column \"error\""));
  EXPECT_THAT(usage_error_of([&] { lines.write(3, {{"step", 1.0}}); }), HasSubstr("given twice"));
  EXPECT_TRUE(table.is_open());
}

TEST(MetricsFile, ExistingFileIsKeptReplacedOrAppended) {
  using enum MetricsFile::Start;
  const TestFolder folder;
  const auto write = [&](MetricsFile::Start start, std::int64_t step) {
    MetricsFile(folder / "table.csv", start).write(step, {{"loss", 1.0}});
  };
  write(kNew, 1);
  EXPECT_EQ(code_of([&] { write(kNew, 2); }), ExitCode::kCannotCreate);
  write(kAppend, 3);
  EXPECT_EQ(folder.read("table.csv"), "step,loss\n1,1\n3,1\n");
  write(kReplace, 4);
  EXPECT_EQ(folder.read("table.csv"), "step,loss\n4,1\n");
  EXPECT_EQ(code_of([&] { MetricsFile(folder / "table.csv/x.csv"); }), ExitCode::kCannotCreate);
}

TEST(MetricsFile, EachEventFileGetsANewName) {
  const TestFolder folder;
  MetricsFile a = MetricsFile::in_tensorboard(folder / "board"), b = MetricsFile::in_tensorboard(folder / "board");
  a = std::move(b);
  a.write(1, {{"loss", 0.5}});
  EXPECT_THAT(a.path().string(), HasSubstr("/board/events.out.tfevents."));
  EXPECT_THAT(TestFolder::content_of(a.path()), HasSubstr("loss"));
  const auto files = std::filesystem::directory_iterator(folder / "board");
  EXPECT_EQ(std::distance(begin(files), end(files)), 2);
}

TEST(MetricsFile, FailedWriteIsOnlyAWarning) {
  const TestFolder folder;
  const pid_t child = ::fork();
  if (child == 0) {
    MetricsFile table(folder / "table.csv");
    table.write(1, {{"loss", 0.5}});
    const rlimit small{12, RLIM_INFINITY};
    ::setrlimit(RLIMIT_FSIZE, &small);
    const bool was_open = table.is_open();
    for (int step = 2; step < 5; ++step) table.write(step, {{"loss", 0.5}});
    ::_exit(was_open && !table.is_open() ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace tessera::testing
