// Tests the launcher's report: which rank's failure is the cause, and which exit code the job gets.

#include "workshop/launch/exit_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <fstream>

namespace tessera {
namespace {

using ::testing::HasSubstr;

RankRecord record(int rank, int code, int second) {
  RankRecord result;
  result.rank = rank;
  result.exit.wait_status = code >= 128 ? code - 128 : W_EXITCODE(code, 0);
  result.exit.when = std::chrono::system_clock::time_point(std::chrono::seconds(second));
  return result;
}

int cause_of(const std::vector<RankRecord>& records) {
  const RankRecord* cause = first_cause(records);
  return cause ? cause->rank : -1;
}

TEST(ExitReport, FirstCauseIsTheEarliestThatIsNoPeerLoss) {
  EXPECT_EQ(cause_of({record(0, 0, 1), record(1, 0, 2)}), -1);
  EXPECT_EQ(cause_of({record(0, 1, 5), record(1, 1, 4), record(2, 0, 1)}), 1);
  EXPECT_EQ(cause_of({record(0, 75, 1), record(1, 70, 4)}), 1);
  EXPECT_EQ(cause_of({record(0, 75, 2), record(1, 75, 1)}), 1);
  EXPECT_EQ(cause_of({record(0, 137, 3), record(1, 75, 1), record(2, 139, 2)}), 2);
}

TEST(ExitReport, RankEndedByTheLauncherIsNoCause) {
  auto ended = record(0, 137, 1);
  ended.ended_by_launcher = true;
  EXPECT_EQ(cause_of({ended, record(1, 75, 2)}), 1);
  EXPECT_EQ(cause_of({ended}), -1);
}

TEST(ExitReport, ErrorFilesTimeGoesBeforeTheExitsTime) {
  auto slow = record(0, 70, 9);
  slow.message_time = std::chrono::system_clock::time_point(std::chrono::seconds(3));
  EXPECT_EQ(cause_of({record(1, 70, 5), slow}), 0);
}

TEST(ExitReport, ErrorToldByAPeerIsNoCause) {
  auto told = record(0, 70, 3);
  told.told_by_peer = true;
  EXPECT_EQ(cause_of({told, record(1, 70, 4)}), 1);
  EXPECT_EQ(cause_of({record(1, 70, 4), told}), 1);
  EXPECT_EQ(cause_of({told}), 0);
}

TEST(ExitReport, ErrorFileTellsWhetherAPeerReportedTheFailure) {
  const std::string path = ::testing::TempDir() + "/told.json";
  for (const char* told : {"true", "false"}) {
    std::ofstream(path) << R"({"message":{"message":"m","extraInfo":{"told_by_peer":)" << told << "}}}";
    RankRecord result;
    read_error_file(path, result);
    EXPECT_EQ(result.told_by_peer, std::string("true") == told);
  }
}

TEST(ExitReport, ExitCodesAndSignalsAreExplained) {
  EXPECT_EQ(record(0, 65, 0).exit.code(), 65);
  EXPECT_EQ(record(0, 137, 0).exit.code(), 137);
  EXPECT_EQ(explain(record(0, 1, 0).exit, std::nullopt), "exit code 1");
  EXPECT_THAT(explain(record(0, 78, 0).exit, 78), HasSubstr("78 (wrong configuration)"));
  EXPECT_THAT(explain(record(0, 139, 0).exit, std::nullopt), HasSubstr("SIGSEGV"));
  EXPECT_THAT(explain(record(0, 137, 0).exit, std::nullopt), HasSubstr("out-of-memory"));
}

TEST(ExitReport, LimitOfCpuTimeIsNamedWhereItMayHaveKilled) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_CPU, &before), 0);
  const rlimit some{100'000, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_CPU, &some), 0);
  EXPECT_THAT(explain(record(0, 137, 0).exit, std::nullopt), HasSubstr("or for CPU time (ulimit -t is 100000 s here)"));
  ASSERT_EQ(::setrlimit(RLIMIT_CPU, &before), 0);
  EXPECT_THAT(explain(record(0, 128 + SIGXCPU, 0).exit, std::nullopt), HasSubstr("its CPU time is used up"));
}

TEST(ExitReport, ParameterServerHasItsNameAndNoRanksNumber) {
  RankRecord server = record(2, 137, 1);
  server.host = "parameter server 0";
  server.pid = 77;
  const std::string text = failure_report({record(0, 75, 2), server}, server);
  EXPECT_THAT(text, HasSubstr("first cause: parameter server 0 (pid 77): signal 9"));
  EXPECT_THAT(text, Not(HasSubstr("rank 2")));
}

TEST(ExitReport, MemoryLimitIsTheOneThatTheRanksHostTold) {
  RankExit exit = record(0, 137, 0).exit;
  EXPECT_THAT(explain(exit, std::nullopt), Not(HasSubstr("memory limit"))) << "this process's own limit is not its";
  exit.memory_limit_bytes = std::int64_t{3} << 29;
  EXPECT_THAT(explain(exit, std::nullopt), HasSubstr("the memory limit of this group 1.50 GiB"));
}

TEST(ExitReport, ProgramsOwnExitCodeGetsNoTesseraMeaning) {
  EXPECT_EQ(explain(record(0, 65, 0).exit, std::nullopt), "exit code 65");
  EXPECT_EQ(explain(record(0, 65, 0).exit, 70), "exit code 65")
      << "the program ended otherwise than Tessera meant it to";
  const std::string path = ::testing::TempDir() + "/code.json";
  std::ofstream(path) << R"({"message":{"message":"m","extraInfo":{"code_of_tessera":65}}})";
  RankRecord result = record(0, 65, 0);
  read_error_file(path, result);
  EXPECT_THAT(failure_report({result}, result), HasSubstr("exit code 65 (corrupt data)"));
}

TEST(ExitReport, ErrorFilesAreReadAndBadOnesIgnored) {
  const std::string path = ::testing::TempDir() + "/error.json";
  const auto read = [&](const std::string& text) {
    std::ofstream(path) << text;
    RankRecord result;
    read_error_file(path, result);
    EXPECT_EQ(result.message.empty(), !result.message_time.has_value());
    return result.message;
  };
  EXPECT_EQ(read(R"({"message":{"message":"nested","extraInfo":{"timestamp":"1"}}})"), "nested");
  EXPECT_EQ(read(R"({"message":"flat"})"), "flat");
  EXPECT_EQ(read(R"({"message":{"message":"odd","extraInfo":7}})"), "odd");
  EXPECT_EQ(read(R"({"message":{"message":"odd","extraInfo":{"told_by_peer":"yes"}}})"), "odd");
  for (const char* broken : {"", "{", "[]", "7", R"({"message":7})", R"({"message":{"message":[]}})", "{}", "\xff\xfe"})
    EXPECT_EQ(read(broken), "") << broken;
  EXPECT_EQ(read(std::string(300'000, '[')), "");
  RankRecord missing;
  read_error_file(path + ".none", missing);
  EXPECT_EQ(missing.message, "");
}

TEST(ExitReport, ReportEndsWithTheCauseAndItsLastLines) {
  auto guilty = record(1, 74, 1);
  guilty.message = "no space left";
  guilty.last_errors = {"line a", "line b"};
  const std::string text = failure_report({record(0, 75, 2), guilty}, guilty);
  const auto block = text.substr(text.find("first cause"));
  EXPECT_THAT(block, HasSubstr("rank 1"));
  EXPECT_THAT(block, HasSubstr("no space left"));
  EXPECT_THAT(block, HasSubstr("    line a\n    line b\n"));
}

TEST(ExitReport, RankThatEndedEarlyWithSuccessIsNamed) {
  const auto lost = record(0, 75, 5);
  const std::string text = failure_report({lost, record(1, 0, 2)}, lost);
  EXPECT_THAT(text, HasSubstr("rank 1 had ended early, and with success (exit code 0), 3.0 s before"));
  // If there is a failure, the report names it instead of the early end.
  const auto guilty = record(0, 74, 5);
  EXPECT_THAT(failure_report({guilty, record(1, 0, 2)}, guilty), Not(HasSubstr("ended early")));
  EXPECT_THAT(failure_report({lost, record(1, 0, 9)}, lost), Not(HasSubstr("ended early")));
}

TEST(ExitReport, ReportOfManyRanksIsShort) {
  std::vector<RankRecord> records;
  for (int rank = 0; rank < 1000; ++rank) records.push_back(record(rank, rank % 2 ? 75 : 0, 3));
  EXPECT_LT(failure_report(records, records[1]).size(), 4000u);
  EXPECT_THAT(failure_report(records, records[1]), HasSubstr("and 468 more"));
}

}  // namespace
}  // namespace tessera
