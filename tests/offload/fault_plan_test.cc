// Tests the faults that tests inject into operations on files, and the text that describes them.

#include "offload/files/fault_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "offload/files/atomic_file.h"
#include "offload/files/fault_environment.h"
#include "offload/files/fault_text.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(FaultPlan, NoFaultHappensWithoutAPlan) {
  EXPECT_EQ(fault_plan(), nullptr);
  EXPECT_EQ(fault_at(FaultSite::kWrite, "x").action, FaultAction::kNone);
}

TEST(FaultPlan, RulesChooseByPathAndCount) {
  ScopedFaults faults({{.site = FaultSite::kWrite, .path = "b", .nth = 2, .action = FaultAction::kErrno, .number = EIO},
                       {.site = FaultSite::kWrite, .every = 3, .action = FaultAction::kShort, .number = 7}});
  std::string seen;
  for (const char* path : {"a", "ab", "b", "abc", "a", "xb"}) {
    const Fault fault = fault_at(FaultSite::kWrite, path);
    seen += fault.action == FaultAction::kErrno ? 'e' : fault.action == FaultAction::kShort ? 's' : '-';
  }
  EXPECT_EQ(seen, "--e--s");  // both rules apply to the third call, and the first rule wins
  EXPECT_EQ(fault_at(FaultSite::kRead, "b").action, FaultAction::kNone);
  EXPECT_EQ(faults.plan().operations(FaultSite::kWrite), 6);
  EXPECT_EQ(faults.plan().operations(FaultSite::kRead), 1);
  EXPECT_EQ(faults.plan().faults(), 2);
}

TEST(FaultPlan, PlanEndsWithItsScope) {
  { ScopedFaults faults({{.site = FaultSite::kRead, .every = 1, .action = FaultAction::kErrno, .number = EIO}}); }
  EXPECT_EQ(fault_at(FaultSite::kRead, "x").action, FaultAction::kNone);
}

TEST(FaultPlan, CrashEndsTheProcess) {
  const ChildEnd end = in_child([] {
    ScopedFaults faults({{.site = FaultSite::kOpen, .nth = 2, .action = FaultAction::kCrash, .number = 41}});
    fault_at(FaultSite::kOpen, "x");
    fault_at(FaultSite::kOpen, "x");
    return 0;
  });
  EXPECT_EQ(end.exit_code, 41);
}

TEST(FaultText, EveryRuleIsRead) {
  const auto rules = parse_fault_rules(
                         "write path=scratch nth=3 errno=ENOSPC; read every=2 short=512;open nth=1 errno=24;"
                         " fsync nth=1 drop_unsynced=keep_renames; rename nth=1 crash; unlink nth=1 crash=3;"
                         "cqe nth=4 short=9; reserve nth=1 delay=2; fsync nth=1 torn=0; fsync nth=2 drop_unsynced; "
                         "read nth=1 delay=100;")
                         .value();
  ASSERT_EQ(rules.size(), 11u);
  EXPECT_EQ(rules[0].site, FaultSite::kWrite);
  EXPECT_EQ(rules[0].path, "scratch");
  EXPECT_EQ(rules[0].nth, 3);
  EXPECT_EQ(rules[0].action, FaultAction::kErrno);
  EXPECT_EQ(rules[0].number, ENOSPC);
  EXPECT_EQ(rules[1].every, 2);
  EXPECT_EQ(rules[1].action, FaultAction::kShort);
  EXPECT_EQ(rules[1].number, 512);
  EXPECT_EQ(rules[2].number, EMFILE);
  EXPECT_TRUE(rules[3].keep_renames);
  EXPECT_EQ(rules[4].number, 137);
  EXPECT_EQ(rules[5].number, 3);
  EXPECT_EQ(rules[6].site, FaultSite::kCqe);
  EXPECT_EQ(rules[7].site, FaultSite::kReserve);
  EXPECT_EQ(rules[7].action, FaultAction::kDelay);
  EXPECT_EQ(rules[8].action, FaultAction::kTorn);
  EXPECT_EQ(rules[9].action, FaultAction::kDropUnsynced);
  EXPECT_FALSE(rules[9].keep_renames);
  EXPECT_EQ(rules[10].number, 100);
  EXPECT_TRUE(parse_fault_rules("").value().empty());
}

TEST(FaultText, UnknownWordsAreRefusedWithTheNearest) {
  for (const auto& [text, want] :
       std::vector<std::pair<std::string, std::string>>{{"writ nth=1 crash", "did you mean \"write\"?"},
                                                        {"write nth=1 cras", "did you mean \"crash\"?"},
                                                        {"write nth=1", "has no action"},
                                                        {"write crash", "want one of nth=N and every=N"},
                                                        {"write nth=1 every=1 crash", "want one of nth=N and every=N"},
                                                        {"write nth=0 crash", "\"nth=0\" has a wrong or missing value"},
                                                        {"write nth=1x crash", "\"nth=1x\" has a wrong"},
                                                        {"write nth=1 errno=EWHAT", "\"errno=EWHAT\" has a wrong"},
                                                        {"write nth=1 errno=EIO short=3", "has two actions"},
                                                        {"write nth=1 drop_unsynced=yes", "has a wrong"},
                                                        {"write nth=1 short", "has a wrong"},
                                                        {"rename nth=1 short=3", "means nothing at this site"},
                                                        {"submit nth=1 delay=3", "means nothing at this site"},
                                                        {"write nth=1 crash=256", "has a wrong"}}) {
    const absl::Status status = parse_fault_rules(text).status();
    EXPECT_EQ(exit_code_of(status), ExitCode::kConfig) << text;
    EXPECT_THAT(message_of(status), HasSubstr(want));
  }
}

// This test is the body of the children below: it writes a file, and exits with the error's exit code.
TEST(FaultEnvironment, ChildProcessWritesOneFile) {
  const char* const path = std::getenv("TESSERA_TEST_PATH");
  if (path == nullptr) return;
  const absl::Status status = write_file_atomically(path, {}, "test");
  std::fputs((message_of(status) + "\n").c_str(), stderr);
  ::_exit(static_cast<int>(exit_code_of(status)));
}

/// Writes a file in a new process, because a process reads the variable only once.
ChildEnd write_with_environment(const std::string& rules, const std::string& path) {
  return in_child([&] {
    ::setenv("TESSERA_TEST_FAULTS", rules.c_str(), 1);
    ::setenv("TESSERA_TEST_PATH", path.c_str(), 1);
    ::setenv("TESSERA_LOG_LEVEL", "info", 1);
    ::execl("/proc/self/exe", "offload_test", "--gtest_brief=1",
            "--gtest_filter=FaultEnvironment.ChildProcessWritesOneFile", nullptr);
    return 98;
  });
}

// Tests are built with TESSERA_FAULTS. fault_environment_off_test.cc tests a program that is built without it.
TEST(FaultEnvironment, RulesComeFromTheVariable) {
  ScratchFolder folder;
  const ChildEnd fails = write_with_environment("rename path=here nth=1 errno=EROFS", folder.file("here"));
  EXPECT_EQ(fails.exit_code, static_cast<int>(ExitCode::kCannotCreate));
  EXPECT_THAT(fails.text, HasSubstr("faults on purpose are in force: rename"));
  const ChildEnd other = write_with_environment("rename path=nowhere nth=1 errno=EROFS", folder.file("there"));
  EXPECT_EQ(other.exit_code, 0) << other.text;
  const ChildEnd wrong = write_with_environment("rename nth=1", folder.file("there"));
  EXPECT_EQ(wrong.exit_code, static_cast<int>(ExitCode::kConfig));
}

}  // namespace
}  // namespace tessera
