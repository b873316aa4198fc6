// Tests the launcher with real processes, which run shell scripts: their variables, output and exit codes, restarts,
// signals and limits.

#include "workshop/launch/launcher.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "runtime/base/status.h"
#include "tests/launch/launched.h"
#include "tests/support/limits/patience.h"
#include "workshop/launch/job_secret.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

TEST(Launch, RanksGetTheVariablesOfTorchrun) {
  auto options = shell(4,
                       "echo r=$RANK w=$WORLD_SIZE l=$LOCAL_RANK lw=$LOCAL_WORLD_SIZE g=$GROUP_RANK a=$MASTER_ADDR "
                       "t=$TESSERA_LAUNCHER; test $MASTER_PORT -gt 0 && test -d $(dirname $TORCHELASTIC_ERROR_FILE)");
  options.pretended_hosts = {2, 2};
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_THAT(launcher.out, HasSubstr("[rank 0] r=0 w=4 l=0 lw=2 g=0 a=127.0.0.1 t=tessera\n"));
  EXPECT_THAT(launcher.out, HasSubstr("[rank 3] r=3 w=4 l=1 lw=2 g=1 a=127.0.0.1 t=tessera\n"));
  EXPECT_EQ(launcher.err, "");
}

/// Returns the path of a script that replaces `tessera serve`.
std::string server_script(const Folder& folder, const std::string& text) {
  const std::string path = folder / "tessera";
  std::ofstream(path) << "#!/bin/sh\n" << text << "\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

TEST(Launch, FailedRankEndsNoOtherBesideServers) {
  const Folder folder;
  auto options = shell(3,
                       "touch $TORCHELASTIC_ERROR_FILE.joined; test $RANK = 1 && kill -9 $$; sleep 0.3; "
                       "echo at=$TESSERA_SERVERS ${#TESSERA_SERVERS_SECRET}");
  options.servers = 2;
  options.tessera = server_script(folder, "echo serves \"$@\"; exec sleep 1000");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("rank 1 has ended: signal 9"), HasSubstr("the others go on"),
                                  HasSubstr("[server 0] serves serve --listen 127.0.0.1:"),
                                  HasSubstr("[server 1] serves serve --listen 127.0.0.1:")));
  EXPECT_THAT(launcher.out, AllOf(HasSubstr("[rank 0] at=127.0.0.1:"), HasSubstr("[rank 2] at=127.0.0.1:"),
                                  HasSubstr(" 32\n"), Not(HasSubstr("[rank 1] at="))));
}

TEST(Launch, RankThatFailsBeforeItHasJoinedTheServersEndsTheOthers) {
  const Folder folder;
  auto options = shell(2, "test $RANK = 1 && exit 5; exec sleep 1000");
  options.servers = 1;
  options.times.grace_s = 0.1;
  options.tessera = server_script(folder, "exec sleep 1000");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 5);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("first cause: rank 1"), Not(HasSubstr("the others go on"))));
}

TEST(Launch, ServerThatEndsIsTheFirstCause) {
  const Folder folder;
  auto options = shell(2, "exec sleep 1000");
  options.servers = 1;
  options.times.grace_s = 0.1;
  options.tessera = server_script(folder, "exit 3");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 3);
  EXPECT_THAT(launcher.err, HasSubstr("parameter server 0"));
}

TEST(Launch, ServerThatKeepsItsShardsStartsAgainOnItsAddress) {
  const Folder folder;
  auto options = shell(1, "until test -e " + (folder / "again") + "; do sleep 0.05; done");
  options.servers = 1;
  options.servers_state = folder / "state";
  options.servers_lose = 4;
  options.tessera =
      server_script(folder, "echo serves \"$@\"\nif mkdir " + (folder / "first") + "; then kill -9 $$; fi\ntouch " +
                                (folder / "again") + "\nexec sleep 1000");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0);
  const std::string::size_type first = launcher.err.find("[server 0] serves serve --listen 127.0.0.1:");
  ASSERT_NE(first, std::string::npos) << launcher.err;
  const std::string line = launcher.err.substr(first, launcher.err.find('\n', first) - first);
  EXPECT_THAT(line, HasSubstr(" --state " + (folder / "state") + " --lose 4"));
  EXPECT_NE(launcher.err.find(line, first + 1), std::string::npos) << launcher.err;
  EXPECT_THAT(launcher.err, HasSubstr("parameter server 0 has ended: signal 9"));
  EXPECT_THAT(launcher.err, HasSubstr("it starts again"));
}

// The child that the server leaves in its process group keeps the launcher from starting the server again until the
// rank has ended.
TEST(Launch, ServerThatKeepsItsShardsMayBeKilledAsTheLastRankEnds) {
  const Folder folder;
  const std::string pid = folder / "pid";
  auto options = shell(1, "until test -s " + pid + "; do sleep 0.01; done; kill -9 $(cat " + pid + ")");
  options.servers = 1;
  options.servers_state = folder / "state";
  options.tessera = server_script(folder, "sleep 1000 & echo $$ > " + pid + "; wait");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
}

TEST(Launch, KeptShardsWithoutServersAreRefused) {
  auto options = shell(1, "true");
  options.servers_state = "state";
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 64);
  EXPECT_THAT(launcher.err, HasSubstr("no parameter servers"));
}

TEST(Launch, RanksThatAllFailBesideServersAreAFailure) {
  const Folder folder;
  auto options = shell(2, "exit 65");
  options.servers = 1;
  options.tessera = server_script(folder, "exec sleep 1000");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 65);
}

/// Returns options for workers that come and go. Their server prints "serves" and ends at SIGUSR1, as `tessera serve`
/// does. `script` runs once the server is running.
LaunchOptions elastic(const Folder& folder, const WorkerRange& workers, const std::string& script) {
  auto options = shell(workers.most, "until test -e " + (folder / "serves") + "; do sleep 0.01; done; " + script);
  options.workers = workers;
  options.servers = 1;
  options.tessera = server_script(
      folder, "trap 'exit 0' USR1; echo serves; touch " + (folder / "serves") + "; while true; do sleep 0.05; done");
  return options;
}

TEST(Launch, KilledWorkerBeginsAnewAndTheOthersGoOn) {
  const Folder folder;
  const std::string again = folder / "again", once = folder / "once";
  auto options =
      elastic(folder, {1, 3},
              "echo r=$RANK w=$WORLD_SIZE n=$TESSERA_WORKER at=$TESSERA_SERVERS; if test $TESSERA_WORKER = 1; "
              "then mkdir " +
                  once + " 2>/dev/null && kill -9 $$; touch " + again + "; fi; until test -e " + again +
                  "; do sleep 0.01; done");
  options.max_restarts = 1;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_THAT(launcher.err,
              AllOf(HasSubstr("worker 1 has ended: signal 9"), HasSubstr("the others go on"),
                    HasSubstr("restart 1 of 1: worker 1 begins anew"), HasSubstr("workers join by --join 127.0.0.1:")));
  EXPECT_THAT(launcher.out, AllOf(HasSubstr("[worker 0] r=0 w=1 n=0 at=127.0.0.1:"),
                                  HasSubstr("[worker 2] r=0 w=1 n=2 at=127.0.0.1:")));
  const std::string of_one = "[worker 1] r=0 w=1 n=1";
  EXPECT_NE(launcher.out.find(of_one), launcher.out.rfind(of_one)) << "it has begun twice";
}

TEST(Launch, ServerOfWorkersThatKeepsItsShardsStartsAgain) {
  const Folder folder;
  const std::string again = folder / "again";
  auto options = elastic(folder, {1, 2}, "until test -e " + again + "; do sleep 0.01; done");
  options.servers_state = folder / "state";
  options.tessera = server_script(folder, "trap 'exit 0' USR1; echo serves; touch " + (folder / "serves") +
                                              "\nif mkdir " + (folder / "first") + "; then kill -9 $$; fi\ntouch " +
                                              again + "\nwhile true; do sleep 0.05; done");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("parameter server 0 has ended: signal 9"), HasSubstr("it starts again")));
}

// The server is killed when this launcher's workers have ended. Workers of another launcher may still need it, so
// the launcher starts it again, and tells it again to end.
TEST(Launch, ServerOfWorkersThatIsKilledBehindTheWorkersOfItsLauncherStartsAgain) {
  const Folder folder;
  const std::string told = folder / "told";
  auto options = elastic(folder, {1, 1}, "true");
  options.servers_state = folder / "state";
  options.tessera = server_script(folder, "trap 'if mkdir " + (folder / "first") + "; then kill -9 $$; fi; echo >> " +
                                              told + "; exit 0' USR1; echo serves; touch " + (folder / "serves") +
                                              "; while true; do sleep 0.05; done");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("parameter server 0 has ended: signal 9"), HasSubstr("it starts again")));
  EXPECT_TRUE(std::filesystem::exists(told)) << "the server that has started again is told to end";
}

// All steps have been made when the worker fails, as the end of the other worker shows. The worker that is started
// again writes the results.
TEST(Launch, WorkerThatFailsToWriteTheResultsBeginsAnewOrIsAFailure) {
  for (const int restarts : {0, 1}) {
    const Folder folder;
    const std::string ended = folder / "ended", once = folder / "once";
    auto options = elastic(folder, {1, 2},
                           "if test $TESSERA_WORKER = 0; then touch " + ended + "; exit 0; fi; until test -e " + ended +
                               "; do sleep 0.01; done; sleep 0.3; : > $TORCHELASTIC_ERROR_FILE.results; if mkdir " +
                               once + " 2>/dev/null; then kill -9 $$; fi");
    options.max_restarts = restarts;
    Launcher launcher(options);
    EXPECT_EQ(launcher.wait(), restarts == 0 ? 137 : 0) << launcher.err;
    EXPECT_THAT(launcher.err, HasSubstr("worker 1 was told to write the results, and has failed"));
    if (restarts > 0) {
      EXPECT_THAT(launcher.err, HasSubstr("restart 1 of 1: worker 1 begins anew"));
    }
  }
}

TEST(Launch, WorkerThatFailsBehindTheResultsIsNoFailure) {
  const Folder folder;
  const std::string ended = folder / "ended";
  const auto options =
      elastic(folder, {1, 2},
              "if test $TESSERA_WORKER = 0; then touch " + ended + "; exit 0; fi; until test -e " + ended +
                  "; do sleep 0.01; done; echo written > $TORCHELASTIC_ERROR_FILE.results; kill -9 $$");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
}

TEST(Launch, TooFewWorkersAreAFailure) {
  const Folder folder;
  auto options = elastic(folder, {2, 3}, "test $TESSERA_WORKER = 2 && exec sleep 1000; exit 65");
  options.times.grace_s = 0.1;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 65);
  EXPECT_THAT(launcher.err, Not(HasSubstr("begins anew")));
}

TEST(Launch, WorkerThatWouldFailAgainIsNotStartedAgain) {
  const Folder folder;
  auto options = elastic(folder, {1, 2}, "exit 78");
  options.max_restarts = 5;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 78);
  EXPECT_THAT(launcher.err, Not(HasSubstr("begins anew")));
}

TEST(Launch, WorkersThatJoinAreGivenServersAndSecret) {
  const Folder folder;
  const std::string secret = random_secret().value_or("");
  std::ofstream(folder / "secret") << secret << "\n";
  std::filesystem::permissions(folder / "secret", std::filesystem::perms::owner_read);
  auto options = shell(2, "test $TESSERA_WORKER = 0 && kill -9 $$; echo at=$TESSERA_SERVERS $TESSERA_SERVERS_SECRET");
  options.workers = {1, 2};
  options.join = "10.0.0.5:4711,10.0.0.5:4712";
  options.secret_file = folder / "secret";
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_THAT(launcher.out, HasSubstr("[worker 1] at=10.0.0.5:4711,10.0.0.5:4712 " + secret + "\n"));
}

TEST(Launch, OptionsOfWorkersThatDoNotFitAreRefused) {
  ::unsetenv("TESSERA_SERVERS_SECRET");
  const auto error_with = [](const std::function<void(LaunchOptions&)>& change) {
    auto options = shell(2, "true");
    options.workers = {1, 2};
    options.join = "127.0.0.1:1";
    options.secret_file = "/nowhere/secret";
    change(options);
    Launcher launcher(options);
    EXPECT_NE(launcher.wait(), 0);
    return launcher.err;
  };
  EXPECT_THAT(error_with([](LaunchOptions&) {}), HasSubstr("cannot be opened"));
  EXPECT_THAT(error_with([](LaunchOptions& o) { o.secret_file.clear(); }), HasSubstr("has to know its secret"));
  EXPECT_THAT(error_with([](LaunchOptions& o) { o.servers = 1; }), HasSubstr("need servers"));
  EXPECT_THAT(error_with([](LaunchOptions& o) { o.join.clear(); }), HasSubstr("need servers"));
  EXPECT_THAT(error_with([](LaunchOptions& o) { o.workers = {}; }), HasSubstr("--workers 1:8"));
  EXPECT_THAT(error_with([](LaunchOptions& o) { o.workers.least = 0; }), HasSubstr("make no sense"));
  EXPECT_THAT(error_with([](LaunchOptions& o) { o.pretended_hosts = {1, 1}; }), HasSubstr("start on this machine"));
}

TEST(JobSecret, FileIsMadeForThisUserAloneAndReadAgain) {
  const Folder folder;
  const std::string file = folder / "secret";
  EXPECT_THAT(message_of(job_secret(file, /*makes_file=*/false).status()), HasSubstr("cannot be opened"));
  const auto made = job_secret(file, /*makes_file=*/true);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_EQ(made->size(), 32u);
  using std::filesystem::perms;
  EXPECT_EQ(std::filesystem::status(file).permissions(), perms::owner_read | perms::owner_write);
  EXPECT_EQ(job_secret(file, /*makes_file=*/false).value_or(""), *made);
  EXPECT_EQ(job_secret(file, /*makes_file=*/true).value_or(""), *made);
  EXPECT_NE(random_secret().value_or(*made), *made);
}

TEST(JobSecret, FilesThatAreNoSecretsAreRefused) {
  const Folder folder;
  const auto error_of = [&](const std::string& name) {
    return message_of(job_secret(folder / name, /*makes_file=*/false).status());
  };
  using std::filesystem::perms;
  for (const auto& [name, mode] : {std::pair("group", perms::group_read), std::pair("others", perms::others_write)}) {
    std::ofstream(folder / name) << "a secret that others know\n";
    std::filesystem::permissions(folder / name, perms::owner_read | mode);
    EXPECT_THAT(error_of(name), HasSubstr("chmod 600"));
  }
  for (const std::size_t length : {0, 15, 257, 300}) {
    const std::string name = std::to_string(length);
    std::ofstream(folder / name) << std::string(length, 'x') << '\n';
    std::filesystem::permissions(folder / name, perms::owner_read);
    EXPECT_THAT(error_of(name), HasSubstr("holds no secret"));
  }
  std::filesystem::create_directory(folder / "folder");
  EXPECT_THAT(error_of("folder"), HasSubstr("no regular file"));
}

TEST(Launch, LinesOfRanksAreNotTorn) {
  // Four ranks write lines at the same time, each line in two halves.
  Launcher launcher(
      shell(4,
            "i=0; while [ $i -lt 200 ]; do printf 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'; "
            "printf 'bbbbbbbbbbbbbbbbbbbbbbbbbbb %s\\n' $RANK; i=$((i+1)); done; printf end; printf e >&2"));
  EXPECT_EQ(launcher.wait(), 0);
  std::istringstream lines(launcher.out);
  std::array<int, 4> count{};
  for (std::string line; std::getline(lines, line);) {
    const int rank = line.at(6) - '0';
    const std::string prefix = "[rank " + std::to_string(rank) + "] ";
    if (line != prefix + "end") {
      ASSERT_EQ(line, prefix + std::string(30, 'a') + std::string(27, 'b') + " " + std::to_string(rank));
    }
    ++count[rank];
  }
  EXPECT_THAT(count, ::testing::Each(201));  // the last line had no line end
  EXPECT_THAT(launcher.err, HasSubstr("[rank 2] e\n"));
}

TEST(Launch, StdoutAndStderrStayApart) {
  auto options = shell(1, "echo to out; echo to err >&2");
  options.prefix = false;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(launcher.out, "to out\n");
  EXPECT_EQ(launcher.err, "to err\n");
}

TEST(Launch, LongOutputArrivesWhole) {
  Launcher launcher(shell(2, "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last"));
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(std::count(launcher.out.begin(), launcher.out.end(), 'x'), 6'000'000);
  EXPECT_THAT(launcher.out, AllOf(HasSubstr("[rank 0] last\n"), HasSubstr("[rank 1] last\n")));
}

TEST(Launch, FirstFailureSetsTheExitCodeAndIsReportedLast) {
  // Rank 2 fails first. The other ranks then fail since they lost a peer, and one of them prints more. They wait until
  // the launcher has reaped rank 2: until then, kill -0 finds rank 2's process.
  const Folder folder;
  const std::string pid = folder / "pid";
  Launcher launcher(
      shell(4, "if [ $RANK = 2 ]; then echo $$ > " + pid + ".new; mv " + pid + ".new " + pid +
                   "; echo the true reason >&2; exit 65; fi; until [ -e " + pid +
                   " ]; do sleep 0.02; done; while kill -0 $(cat " + pid +
                   ") 2>/dev/null; do sleep 0.02; done; echo peer lost >&2; [ $RANK = 1 ] && kill -SEGV $$; exit 75"));
  EXPECT_EQ(launcher.wait(), 65);
  const auto block = launcher.err.find("first cause: rank 2");
  ASSERT_NE(block, std::string::npos) << launcher.err;
  EXPECT_THAT(launcher.err.substr(block),
              AllOf(HasSubstr("exit code 65\n"), HasSubstr("the true reason"), Not(HasSubstr("[rank"))));
  EXPECT_THAT(launcher.err, HasSubstr("rank 1 (pid"));
  EXPECT_THAT(launcher.err, HasSubstr("signal 11 (SIGSEGV)"));
}

TEST(Launch, LaterFailureGoesBeforePeerLoss) {
  // The rank whose failure is the cause ends slowly. The ranks that this rank aborted end earlier.
  Launcher launcher(shell(3, "if [ $RANK = 0 ]; then sleep 0.4; exit 70; fi; exit 75"));
  EXPECT_EQ(launcher.wait(), 70);
  EXPECT_THAT(launcher.err, HasSubstr("first cause: rank 0"));
}

TEST(Launch, JobOfPeerLossesAloneExitsWith75) {
  Launcher launcher(shell(2, "exit 75"));
  EXPECT_EQ(launcher.wait(), 75);
}

TEST(Launch, ErrorFilesGiveTheOrderAndMessageOfFailures) {
  const Folder folder;
  const std::string has_failed = folder / "has-failed";
  Launcher launcher(shell(
      2,
      "if [ $RANK = 1 ]; then echo '{\"message\":{\"message\":\"loss is nan\",\"extraInfo\":{}}}' > "
      "$TORCHELASTIC_ERROR_FILE; touch " +
          has_failed + "; sleep 0.4; exit 70; fi; until [ -e " + has_failed + " ]; do sleep 0.02; done; exit 66"));
  EXPECT_EQ(launcher.wait(), 70);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("first cause: rank 1"), HasSubstr("it reported: loss is nan")));
}

TEST(Launch, RestartsAfterAFailure) {
  auto options = shell(2,
                       "echo start $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS at $MASTER_PORT; "
                       "[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0; [ $RANK = 1 ] && kill -KILL $$; exit 75");
  options.max_restarts = 3;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
  for (const char* start : {"start 0 of 3", "start 1 of 3", "start 2 of 3"})
    EXPECT_THAT(launcher.out, HasSubstr(start));
  EXPECT_THAT(launcher.out, Not(HasSubstr("start 3")));
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("restart 1 of 3"), HasSubstr("restart 2 of 3"), Not(HasSubstr("restart 3")),
                                  HasSubstr("first cause: rank 1")));
}

TEST(Launch, GivesUpAfterTheAllowedRestarts) {
  auto options = shell(2, "echo start $TORCHELASTIC_RESTART_COUNT; exit $((70 + TORCHELASTIC_RESTART_COUNT))");
  options.max_restarts = 2;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 72);
  EXPECT_THAT(launcher.out, AllOf(HasSubstr("start 2"), Not(HasSubstr("start 3"))));
}

TEST(Launch, UsageInputPermissionAndConfigErrorsAreNotRestarted) {
  for (const char* code : {"64", "66", "77", "78"}) {
    auto options = shell(2, std::string("[ $RANK = 1 ] && exit ") + code + "; exit 75");
    options.max_restarts = 2;
    Launcher launcher(options);
    EXPECT_EQ(launcher.wait(), std::stoi(code));
    EXPECT_THAT(launcher.err, Not(HasSubstr("restart")));
  }
}

TEST(Launch, InterruptEndsTheRestarts) {
  auto options = shell(2, "echo ready $TORCHELASTIC_RESTART_COUNT; sleep 30");
  options.max_restarts = 5;
  Launcher launcher(options);
  launcher.wait_for("[rank 0] ready 0");
  launcher.wait_for("[rank 1] ready 0");
  launcher.send(SIGINT);
  EXPECT_NE(launcher.wait(), 0);
  EXPECT_THAT(launcher.out, Not(HasSubstr("ready 1")));
}

// The error report of a rank from an earlier start is not used for the next start.
TEST(Launch, ErrorReportOfAnEarlierStartIsNotReused) {
  auto options = shell(1,
                       "[ $TORCHELASTIC_RESTART_COUNT = 0 ] && echo '{\"message\":\"the first start\"}' > "
                       "$TORCHELASTIC_ERROR_FILE; exit 70");
  options.max_restarts = 1;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 70);
  const auto restarted = launcher.err.find("restart 1 of 1");
  ASSERT_NE(restarted, std::string::npos);
  EXPECT_THAT(launcher.err.substr(0, restarted), HasSubstr("the first start"));
  EXPECT_THAT(launcher.err.substr(restarted), Not(HasSubstr("the first start")));
}

TEST(Launch, KilledRankIsNamedWithItsSignalAndMeaning) {
  Launcher launcher(shell(2, "[ $RANK = 1 ] && kill -KILL $$; exit 0"));
  EXPECT_EQ(launcher.wait(), 137);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("first cause: rank 1"), HasSubstr("signal 9 (SIGKILL)"),
                                  HasSubstr("out-of-memory killer"), HasSubstr("GiB")));
}

TEST(Launch, RanksThatIgnoreTermAreKilledAfterTheGrace) {
  auto options = shell(3,
                       "trap '' TERM; [ $RANK = 1 ] && exit 3; [ $RANK = 2 ] && trap - TERM; "
                       "echo pid=$$; while :; do sleep 0.05; done");
  options.times.grace_s = 0.3;
  options.times.term_s = 0.3;
  Deadline soon(5s);
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 3);
  EXPECT_GE(soon.seconds(), 0.3);
  EXPECT_FALSE(soon.passed());
  for (const pid_t pid : numbers_after(launcher.out, "pid=")) EXPECT_FALSE(is_running(pid));
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("rank 0 (pid"), HasSubstr("was ended by the launcher")));
}

TEST(Launch, OtherRanksReportWithinTheGracePeriod) {
  Launcher launcher(shell(2, "[ $RANK = 1 ] && exit 4; sleep 0.5; echo report done; exit 75"));
  EXPECT_EQ(launcher.wait(), 4);
  EXPECT_THAT(launcher.out, HasSubstr("[rank 0] report done"));
}

TEST(Launch, StoppedRankIsEndedAndNamed) {
  auto options = shell(2, "echo pid=$$; [ $RANK = 1 ] && kill -STOP $$; sleep 0.3; exit 75");
  options.times.grace_s = 60;  // a stopped rank does not get this time
  options.times.term_s = 0.3;
  Deadline soon(20s);
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 75);
  EXPECT_FALSE(soon.passed());
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("was stopped (SIGSTOP)"), HasSubstr("first cause: rank 0")));
  for (const pid_t pid : numbers_after(launcher.out, "pid=")) EXPECT_FALSE(is_running(pid));
}

TEST(Launch, GrandchildrenAreEnded) {
  Launcher launcher(shell(2, "sleep 1000 & echo pid=$!; exit 0"));
  EXPECT_EQ(launcher.wait(), 0);
  const auto pids = numbers_after(launcher.out, "pid=");
  ASSERT_EQ(pids.size(), 2u);
  for (const pid_t pid : pids) EXPECT_TRUE(becomes_true([&] { return !is_running(pid); }));
}

TEST(Launch, NothingOutlivesAKilledLauncher) {
  auto options = shell(3,
                       "sleep 1000 & echo pid=$$ pid=$! dir=$(dirname $TORCHELASTIC_ERROR_FILE)@; touch "
                       "$TORCHELASTIC_ERROR_FILE; echo ready; wait");
  Launcher launcher(options);
  for (int rank = 0; rank < 3; ++rank) launcher.wait_for("[rank " + std::to_string(rank) + "] ready");
  const auto pids = numbers_after(launcher.out, "pid=");
  ASSERT_EQ(pids.size(), 6u);
  for (const pid_t pid : pids) ASSERT_TRUE(is_running(pid));
  const auto dir = launcher.out.find("dir=") + 4;
  const std::string directory = launcher.out.substr(dir, launcher.out.find('@', dir) - dir);
  ASSERT_TRUE(std::filesystem::exists(directory));

  launcher.send(SIGKILL);
  EXPECT_EQ(launcher.wait(), 137);
  for (const pid_t pid : pids) EXPECT_TRUE(becomes_true([&] { return !is_running(pid); })) << pid;
  EXPECT_TRUE(becomes_true([&] { return !std::filesystem::exists(directory); }));
}

TEST(Launch, SignalsAreForwardedToAllRanks) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Launcher launcher(shell(2,
                            "trap 'echo saving; sleep 0.2; echo saved; exit 0' INT TERM; echo ready; "
                            "while :; do sleep 0.05; done"));
    launcher.wait_for("[rank 0] ready");
    launcher.wait_for("[rank 1] ready");
    launcher.send(signal);
    EXPECT_EQ(launcher.wait(), 0);
    EXPECT_THAT(launcher.out, AllOf(HasSubstr("[rank 0] saved"), HasSubstr("[rank 1] saved")));
  }
}

TEST(Launch, SignalThatEndsTheRanksIsTheExitCode) {
  Launcher launcher(shell(2, "echo ready; exec sleep 1000"));
  launcher.wait_for("[rank 0] ready");
  launcher.wait_for("[rank 1] ready");
  launcher.send(SIGTERM);
  EXPECT_EQ(launcher.wait(), 143);
}

TEST(Launch, ThirdSignalKillsTheRanks) {
  Launcher launcher(shell(2, "trap '' INT; echo pid=$$; echo ready; while :; do sleep 0.05; done"));
  launcher.wait_for("[rank 0] ready");
  launcher.wait_for("[rank 1] ready");
  for (const char* answer : {"waiting for them", "a third one kills", ": killing"}) {
    launcher.send(SIGINT);
    launcher.wait_for(answer);
  }
  EXPECT_EQ(launcher.wait(), 137);
  for (const pid_t pid : numbers_after(launcher.out, "pid=")) EXPECT_FALSE(is_running(pid));
}

TEST(Launch, ClosedLogDoesNotEndTheJob) {
  std::array<int, 2> broken;
  ASSERT_EQ(::pipe2(broken.data(), O_CLOEXEC), 0);
  ::close(broken[0]);
  const pid_t pid = ::fork();
  if (pid == 0) {
    auto options = shell(2, "echo a; sleep 0.1; echo b; exit 0");
    options.stdout_fd = options.stderr_fd = broken[1];
    ::_exit(launch(options));
  }
  ::close(broken[1]);
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(Launch, FullLogDoesNotEndTheJobButIsReportedAtItsEnd) {
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  std::array<int, 2> err;
  ASSERT_EQ(::pipe2(err.data(), O_CLOEXEC), 0);
  auto options = shell(2, "echo a; sleep 0.1; echo b >&2");
  options.stdout_fd = full;
  options.stderr_fd = err[1];
  EXPECT_EQ(launch(options), 74);
  ::close(err[1]);
  std::string said(4096, '\0');
  said.resize(static_cast<std::size_t>(std::max<ssize_t>(::read(err[0], said.data(), said.size()), 0)));
  EXPECT_THAT(said, AllOf(HasSubstr("[rank 1] b"), HasSubstr("some of what they printed is lost: No space left")));
  ::close(err[0]);
  ::close(full);
}

TEST(Launch, LauncherRestoresSignalsAndSubreaper) {
  sigset_t before, after;
  int subreaper = -1;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
  EXPECT_EQ(launch(shell(2, "exit 0")), 0);
  EXPECT_EQ(launch(shell(2, "exit 0")), 0);
  ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
  ::prctl(PR_GET_CHILD_SUBREAPER, &subreaper);
  for (int signal = 1; signal < 32; ++signal) EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal));
  EXPECT_EQ(subreaper, 0);
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);  // no child process is left
  EXPECT_EQ(errno, ECHILD);
}

TEST(Launch, RanksStartWithOrdinarySignals) {
  Launcher launcher(shell(1, "grep -E 'Sig(Blk|Ign)' /proc/self/status; yes | head -1 > /dev/null"));
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_THAT(launcher.out, AllOf(HasSubstr("SigBlk:\t0000000000000000"), HasSubstr("SigIgn:\t0000000000000000")));
}

TEST(Launch, RanksMayOpenAsManyFilesAsTheHardLimitAllows) {
  Launcher launcher(shell(1, "ulimit -n"), rlimit{100, 200});
  EXPECT_EQ(launcher.wait(), 0);
  EXPECT_EQ(launcher.out, "[rank 0] 200\n");
}

TEST(Launch, DescriptorLimitIsNamed) {
  Launcher launcher(shell(8, "exit 0"), rlimit{12, 12});
  EXPECT_EQ(launcher.wait(), 71);
  EXPECT_THAT(launcher.err, HasSubstr("hint: raise the limit of open files (ulimit -n), which is 12 here"));
}

struct Wrong {
  const char* name;
  std::function<void(LaunchOptions&)> change;
  int code;
  const char* said;
};

TEST(Launch, WrongOptionsAreRefusedBeforeAnyRankStarts) {
  const std::string not_executable = ::testing::TempDir() + "/not_executable";
  std::ofstream(not_executable) << "text";
  const std::vector<Wrong> table = {
      {"no program", [](auto& o) { o.command = {}; }, 64, "no program"},
      {"no ranks", [](auto& o) { o.ranks = 0; }, 64, "got 0"},
      {"too many", [](auto& o) { o.ranks = 100000; }, 64, "100000"},
      {"hosts",
       [](auto& o) {
         o.pretended_hosts = {1, 1, 1};
       },
       64, "3 pretended hosts with 3 ranks"},
      {"port", [](auto& o) { o.port = 70000; }, 64, "70000"},
      {"grace", [](auto& o) { o.times.grace_s = -1; }, 64, "-1"},
      {"missing", [](auto& o) { o.command = {"no-such-program-here"}; }, 66, "no-such-program-here"},
      {"missing path", [](auto& o) { o.command = {"/no/such/program"}; }, 66, "/no/such/program"},
      {"not executable", [&](auto& o) { o.command = {not_executable}; }, 77, "not_executable"},
  };
  for (const Wrong& row : table) {
    auto options = shell(4, "echo started");
    row.change(options);
    Launcher launcher(options);
    EXPECT_EQ(launcher.wait(), row.code) << row.name;
    EXPECT_THAT(launcher.err, HasSubstr(row.said)) << row.name;
    EXPECT_THAT(launcher.out, Not(HasSubstr("started"))) << row.name;
  }
}

TEST(Launch, PortInUseIsNamed) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(socket, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(socket, 1), 0);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
  auto options = shell(2, "exit 0");
  options.port = ntohs(address.sin_port);
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 69);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("port " + std::to_string(options.port)), HasSubstr("hint")));
  ::close(socket);
}

TEST(Launch, APortIsHeldForRankZeroWhileTheJobRuns) {
  Launcher launcher(shell(1, "echo port=$MASTER_PORT; read line; exit 0"));
  launcher.wait_for("\n");
  const auto ports = numbers_after(launcher.out, "port=");
  ASSERT_EQ(ports.size(), 1u);
  // c10d's store sets `reuse`. When the system chooses a port for a program, it looks for one that is free without
  // `reuse`.
  const auto can_listen = [&](bool reuse) {
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = reuse;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(ports[0]));
    const bool could =
        ::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && ::listen(socket, 1) == 0;
    ::close(socket);
    return could;
  };
  EXPECT_FALSE(can_listen(/*reuse=*/false));
  EXPECT_TRUE(can_listen(/*reuse=*/true));
}

}  // namespace
}  // namespace tessera
