// Tests ranks of several hosts. tests/support/ssh/ssh_stand_in takes ssh's place, so all hosts are this machine.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/launch/launched.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// Returns options to run `script` on each rank of hosts of two ranks each.
LaunchOptions on_hosts(int hosts, const std::string& script) {
  auto options = shell(2 * hosts, script);
  for (int i = 1; i <= hosts; ++i) options.hosts.push_back({"127.0.0." + std::to_string(i), 2});
  options.over_ssh.command = {TESSERA_SSH_STAND_IN};
  options.tessera = TESSERA_PROGRAM;
  return options;
}

/// Makes a program that replaces `tessera` on the other hosts.
std::string script_file(const Folder& folder, const std::string& text) {
  const std::string path = folder / "a program's name";
  std::ofstream(path) << "#!/bin/sh\n" << text << "\n";
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
  return path;
}

/// A variable of this process that is set while the object exists.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

TEST(LaunchHosts, RanksOfAllHostsGetTheVariablesOfOneJob) {
  const Variable listed("OMP_LISTED", "a b"), named("MY_DATA", "$x\n'"), other("MY_OTHER", "1");
  auto options = on_hosts(3,
                          "printf '%s\\n' \"r=$RANK w=$WORLD_SIZE l=$LOCAL_RANK lw=$LOCAL_WORLD_SIZE g=$GROUP_RANK "
                          "gw=$GROUP_WORLD_SIZE a=$MASTER_ADDR h=$TESTED_HOST t=$TESSERA_LAUNCHER "
                          "d=$PWD ($OMP_LISTED) ($MY_OTHER) ($MY_DATA)\"; echo e=$RANK >&2; "
                          "test -d $(dirname $TORCHELASTIC_ERROR_FILE) || exit 9; echo port=$MASTER_PORT");
  options.over_ssh.environment = {"MY_DATA"};
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
  const std::string there = std::filesystem::current_path().string();
  EXPECT_THAT(launcher.out,
              HasSubstr("[rank 0] r=0 w=6 l=0 lw=2 g=0 gw=3 a=127.0.0.1 h= t=tessera d=" + there + " (a b) (1) ($x\n"));
  EXPECT_THAT(launcher.out, HasSubstr("[rank 3] r=3 w=6 l=1 lw=2 g=1 gw=3 a=127.0.0.1 h=127.0.0.2 t=tessera d=" +
                                      there + " (a b) () ($x\n[rank 3] ')\n"));
  EXPECT_THAT(launcher.out, HasSubstr("[rank 5] r=5 w=6 l=1 lw=2 g=2 gw=3 a=127.0.0.1 h=127.0.0.3"));
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("[rank 1] e=1\n"), HasSubstr("[rank 4] e=4\n")));
  const auto ports = numbers_after(launcher.out, "port=");
  EXPECT_EQ(std::vector<pid_t>(6, ports.front()), ports);
}

TEST(LaunchHosts, OddArgumentsArriveWhole) {
  const std::vector<std::string> odd = {
      "a b", "it's", "\"q\"", "$HOME `id` $(id) ${x}", "\\ \\n \\\\",       "two\nlines", "", "*", "~", "-n",
      "--",  "#",    "!x",    "a;b|c&d>e<f",           "\xc3\xbc\xff\x01\t"};
  std::string expected;
  for (const std::string& word : odd) expected += "<" + word + ">";
  auto options = on_hosts(2, "[ $RANK = 3 ] || exit 0; printf '<%s>' \"$@\"");
  options.prefix = false;
  options.command.push_back("sh");
  options.command.insert(options.command.end(), odd.begin(), odd.end());
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
  EXPECT_EQ(launcher.out, expected + "\n");
}

TEST(LaunchHosts, ManyArgumentsAndMuchOutputArrive) {
  auto options = on_hosts(2, "echo $#; [ $RANK = 2 ] && head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last");
  options.command.insert(options.command.end(), 20'000, std::string(50, 'w'));  // more than a pipe holds
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
  EXPECT_THAT(launcher.out, AllOf(HasSubstr("[rank 2] 19999\n"), HasSubstr("[rank 2] last\n")));
  EXPECT_EQ(std::count(launcher.out.begin(), launcher.out.end(), 'x'), 3'000'000);
}

TEST(LaunchHosts, FirstCauseOnAnotherHostIsReportedWithItsHost) {
  const Folder folder;
  const std::string failed = folder / "failed";
  Launcher launcher(on_hosts(2,
                             "if [ $RANK = 3 ]; then echo '{\"message\":{\"message\":\"loss is "
                             "nan\",\"extraInfo\":{\"code_of_tessera\":65}}}' > "
                             "$TORCHELASTIC_ERROR_FILE; echo the true reason >&2; touch " +
                                 failed + "; exit 65; fi; until [ -e " + failed + " ]; do sleep 0.02; done; exit 75"));
  EXPECT_EQ(launcher.wait(), 65);
  const auto block = launcher.err.find("first cause: rank 3 (pid ");
  ASSERT_NE(block, std::string::npos) << launcher.err;
  EXPECT_THAT(launcher.err.substr(block),
              AllOf(HasSubstr(" on 127.0.0.2): exit code 65 (corrupt data)"), HasSubstr("it reported: loss is nan"),
                    HasSubstr("    the true reason")));
  EXPECT_THAT(launcher.err, HasSubstr("rank 0 (pid "));
}

TEST(LaunchHosts, RanksOfOtherHostsThatIgnoreTermAreKilled) {
  auto options = on_hosts(
      2, "trap '' TERM; sleep 1000 & echo pid=$$ pid=$!; [ $RANK = 0 ] && exit 3; while :; do sleep 0.05; done");
  options.times.grace_s = options.times.term_s = 0.3;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 3);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("first cause: rank 0"), HasSubstr("was ended by the launcher")));
  for (const pid_t pid : numbers_after(launcher.out, "pid="))
    EXPECT_TRUE(becomes_true([&] { return !is_running(pid); }));
}

TEST(LaunchHosts, StoppedRankOfAnotherHostIsEndedAndNamed) {
  auto options = on_hosts(2, "[ $RANK = 3 ] && kill -STOP $$; sleep 0.3; exit 75");
  options.times.term_s = 0.3;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 75);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("on 127.0.0.2): was stopped (SIGSTOP)"), HasSubstr("first cause: rank ")));
}

TEST(LaunchHosts, SignalsReachTheRanksOfAllHosts) {
  for (const int signal : {SIGINT, SIGTERM}) {
    Launcher launcher(on_hosts(2, "trap 'echo saved; exit 0' INT TERM; echo ready; while :; do sleep 0.05; done"));
    for (int rank = 0; rank < 4; ++rank) launcher.wait_for("[rank " + std::to_string(rank) + "] ready");
    launcher.send(signal);
    EXPECT_EQ(launcher.wait(), 0) << launcher.err;
    for (int rank = 0; rank < 4; ++rank)
      EXPECT_THAT(launcher.out, HasSubstr("[rank " + std::to_string(rank) + "] saved"));
  }
}

TEST(LaunchHosts, NothingOutlivesAKilledLauncherOnAnyHost) {
  Launcher launcher(on_hosts(2, "sleep 1000 & echo pid=$$ pid=$!; echo ready; wait"));
  for (int rank = 0; rank < 4; ++rank) launcher.wait_for("[rank " + std::to_string(rank) + "] ready");
  const auto pids = numbers_after(launcher.out, "pid=");
  ASSERT_EQ(pids.size(), 8u);
  launcher.send(SIGKILL);
  EXPECT_EQ(launcher.wait(), 137);
  for (const pid_t pid : pids) EXPECT_TRUE(becomes_true([&] { return !is_running(pid); })) << pid;
}

TEST(LaunchHosts, SilentLauncherEndsTheRanksOfOtherHosts) {
  auto options = on_hosts(2, "echo pid$RANK=$$; echo ready; exec sleep 1000");
  options.times.silence_s = patient_s(1);
  Launcher launcher(options);
  for (int rank = 0; rank < 4; ++rank) launcher.wait_for("[rank " + std::to_string(rank) + "] ready");
  const pid_t there = numbers_after(launcher.out, "pid3=").at(0), here = numbers_after(launcher.out, "pid0=").at(0);
  std::this_thread::sleep_for(std::chrono::duration<double>(2.5 * options.times.silence_s));
  EXPECT_TRUE(is_running(there));  // the launcher was silent for longer than silence_s, but it lives
  launcher.send(SIGSTOP);
  EXPECT_TRUE(becomes_true([&] { return !is_running(there); }));
  EXPECT_TRUE(is_running(here));
}

TEST(LaunchHosts, LostConnectionEndsTheJobWithThatCause) {
  // The agent is the parent of the ranks. If anything ends the agent, the connection ends too.
  const Folder folder;
  const std::string all = folder / "all";
  auto options = on_hosts(2, "echo pid=$$; echo ready; [ $RANK = 3 ] || exec sleep 1000; until [ -e " + all +
                                 " ]; do sleep 0.02; done; kill -KILL $PPID; sleep 1000");
  options.times.grace_s = 0.3;
  Launcher launcher(options);
  for (int rank = 0; rank < 4; ++rank) launcher.wait_for("[rank " + std::to_string(rank) + "] ready");
  std::ofstream(all) << "started";
  EXPECT_EQ(launcher.wait(), 75);
  EXPECT_THAT(launcher.err,
              AllOf(HasSubstr("first cause: rank 2"), HasSubstr("on 127.0.0.2): the connection to its host has "
                                                                "ended: ssh ended with signal 9\n")));
  for (const pid_t pid : numbers_after(launcher.out, "pid="))
    EXPECT_TRUE(becomes_true([&] { return !is_running(pid); })) << pid;
}

TEST(LaunchHosts, RestartsBeginAnewOnAllHosts) {
  auto options =
      on_hosts(2, "echo start $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 0; exit 75");
  options.max_restarts = 1;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
  EXPECT_THAT(launcher.out, AllOf(HasSubstr("[rank 3] start 0\n"), HasSubstr("[rank 3] start 1\n")));
}

TEST(LaunchHosts, SignalBeforeAllHostsHaveAnsweredStartsNothing) {
  const Folder folder;
  auto options = on_hosts(2, "echo started");
  options.tessera = script_file(folder, "echo here >&2; exec sleep 1000");
  Launcher launcher(options);
  launcher.wait_for("[host 127.0.0.2] here");
  launcher.send(SIGTERM);
  EXPECT_EQ(launcher.wait(), 143);
  EXPECT_THAT(launcher.out, Not(HasSubstr("started")));
}

TEST(LaunchHosts, WhatALoginShellPrintsIsPassedOver) {
  const Folder folder;
  auto options = on_hosts(2, "echo started");
  options.tessera = script_file(folder, "echo Welcome; printf 'no end of line '; exec " TESSERA_PROGRAM " \"$@\"");
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 0) << launcher.err;
  EXPECT_THAT(launcher.out, AllOf(HasSubstr("[rank 3] started"), Not(HasSubstr("Welcome"))));
}

struct Failing {
  const char* name;
  std::function<void(LaunchOptions&)> change;
  int code;
  std::vector<std::string> said;
};

TEST(LaunchHosts, HostsThatCannotStartRanksAreNamedBeforeAnyRankStarts) {
  const Folder folder;
  const std::string other_version = script_file(folder, "echo tessera-launch-agent 0.1.0; sleep 100");
  const Folder old_folder, silent_folder, broken_folder;
  const std::string old = script_file(old_folder, "echo \"tessera: has no command launch-agent\" >&2; exit 64");
  const std::string silent = script_file(silent_folder, "exec sleep 1000");
  const std::string broken = script_file(broken_folder, "echo no library >&2; exit 3");
  const std::vector<Failing> table = {
      {"missing",
       [](auto& o) { o.tessera = "/no/such/tessera"; },
       66,
       {"host 127.0.0.2 has no /no/such/tessera", "install"}},
      {"version",
       [&](auto& o) { o.tessera = other_version; },
       78,
       {"host 127.0.0.2 has Tessera 0.1.0, and this one has"}},
      {"old", [&](auto& o) { o.tessera = old; }, 78, {"knows no launch-agent: tessera: has no command"}},
      {"silent",
       [&](auto& o) {
         o.tessera = silent;
         o.times.connect_s = 0.3;
       },
       69,
       {"has not answered within 0.3 s"}},
      {"broken", [&](auto& o) { o.tessera = broken; }, 69, {"exit code 3: no library"}},
      {"no ssh",
       [](auto& o) { o.over_ssh.command = {"no-such-ssh"}; },
       66,
       {"no \"no-such-ssh\" that starts", "openssh-client"}},
      {"not here",
       [](auto& o) { o.hosts[0].name = "192.0.2.1"; },
       64,
       {"the first host, 192.0.2.1, is not this machine"}},
      {"pretended too",
       [](auto& o) {
         o.pretended_hosts = {2, 2};
       },
       64,
       {"--pretend-hosts"}},
      {"variable",
       [](auto& o) { o.over_ssh.environment = {"NO_SUCH_VARIABLE_HERE"}; },
       64,
       {"--env \"NO_SUCH_VARIABLE_HERE\""}},
  };
  for (const Failing& row : table) {
    auto options = on_hosts(2, "echo started");
    row.change(options);
    Launcher launcher(options);
    EXPECT_EQ(launcher.wait(), row.code) << row.name << launcher.err;
    for (const std::string& said : row.said) EXPECT_THAT(launcher.err, HasSubstr(said)) << row.name;
    EXPECT_THAT(launcher.err, HasSubstr("hint: ")) << row.name;
    EXPECT_THAT(launcher.out, Not(HasSubstr("started"))) << row.name;
  }
  const Variable fails("SSH_STAND_IN_FAILS", "127.0.0.2");
  Launcher launcher(on_hosts(3, "echo started"));
  EXPECT_EQ(launcher.wait(), 69);
  EXPECT_THAT(
      launcher.err,
      HasSubstr(
          "launch: host 127.0.0.2 cannot be reached: ssh: connect to host 127.0.0.2 port 22: Connection refused"));
  EXPECT_THAT(launcher.out, Not(HasSubstr("started")));
}

TEST(LaunchHosts, HostThatAnswersAndStartsNothingIsNamedWhenItsTimeIsUp) {
  const Folder folder;
  auto options = on_hosts(2, "sleep 1000");
  // The agent sends its greeting, and then nothing more.
  options.tessera = script_file(folder, TESSERA_PROGRAM " launch-agent < /dev/null 2> /dev/null; exec sleep 1000");
  options.times.connect_s = 3;
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 69);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("launch: host 127.0.0.2 has answered, and for 3 s has told nothing"),
                                  HasSubstr("hint: ")));
}

/// Makes an agent that does not see the files in `hidden`, as on a host to which `hidden` was not copied.
std::string agent_without(const Folder& folder, const std::string& hidden) {
  return script_file(
      folder, "exec unshare -m sh -c 'mount -t tmpfs none \"$0\" && exec " TESSERA_PROGRAM " launch-agent' " + hidden);
}

bool may_mount() { return ::system("unshare -m mount -t tmpfs none /mnt 2>/dev/null") == 0; }

TEST(LaunchHosts, ProgramThatIsMissingOnAnotherHostIsNamedWithTheHost) {
  if (!may_mount()) GTEST_SKIP() << "no right to mount here";
  const Folder agent, program;
  auto options = on_hosts(2, "");
  options.tessera = agent_without(agent, program / "");
  options.command = {script_file(program, "sleep 1000")};
  Launcher launcher(options);
  EXPECT_EQ(launcher.wait(), 66);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("launch: host 127.0.0.2: cannot start " + options.command[0]),
                                  HasSubstr("hint: give its path")));
}

TEST(LaunchHosts, WorkingDirectoryThatIsMissingOnAnotherHostIsNamedWithTheHost) {
  if (!may_mount()) GTEST_SKIP() << "no right to mount here";
  const Folder agent, folder;
  auto options = on_hosts(2, "sleep 1000");
  options.tessera = agent_without(agent, folder / "");
  const auto before = std::filesystem::current_path();
  std::filesystem::create_directory(folder / "inner");
  std::filesystem::current_path(folder / "inner");
  Launcher launcher(options);
  std::filesystem::current_path(before);
  EXPECT_EQ(launcher.wait(), 66);
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("launch: host 127.0.0.2: no working directory " + (folder / "inner")),
                                  HasSubstr("hint: ranks of all hosts start in the folder")));
}

}  // namespace
}  // namespace tessera
