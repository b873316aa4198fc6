// Tests `tessera launch --hosts`: training on hosts that are reached over ssh. tests/support/ssh/ssh_stand_in takes the
// place of ssh. It also tests launchers on two hosts, of which the second one joins a running job (`--join`). Hosts are
// network namespaces (scripts/net_lab), or addresses of the loopback interface if namespaces cannot be made.

#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <string>
#include <thread>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace hosts_test {

using ::testing::Contains;
using ::testing::HasSubstr;

constexpr int kSkipped = 77;

class Hosts : public Workplace {
 protected:
  void SetUp() override {
    const Ended ended = run_program({TESSERA_NET_LAB, "up", "--lab", lab_, "--hosts", "2"}, path("lab"));
    in_namespaces_ = ended.code == 0;
    if (!in_namespaces_) {
      ASSERT_EQ(ended.code, kSkipped) << ended.err;
      RecordProperty("hosts", "the loopback interface: " + ended.err);
    }
  }
  void TearDown() override {
    if (in_namespaces_) run({TESSERA_NET_LAB, "down", "--lab", lab_});
  }

  /// Returns the launcher's command on the first of two hosts with two ranks each. Each rank has one thread, since more
  /// threads would change the bits of LibTorch's matrix products.
  Words on_two_hosts(const Words& hosts_of_loopback, const Words& hosts_of_lab) const {
    const Words ssh = {"--ssh", TESSERA_SSH_STAND_IN, "--"};
    const Words launch = {TESSERA_PROGRAM, "launch"};
    if (!in_namespaces_) return Words{"env", "OMP_NUM_THREADS=1"} + launch + hosts_of_loopback + ssh;
    return Words{"ip", "netns", "exec", lab_ + "-h0", "env", "OMP_NUM_THREADS=1", "SSH_STAND_IN_NAMESPACE=" + lab_} +
           launch + hosts_of_lab + ssh;
  }
  Words on_two_hosts() const {
    return on_two_hosts({"--hosts", "127.0.0.1:2,127.0.0.2:2"}, {"--hosts", "10.77.0.1:2,10.77.0.2:2"});
  }

  /// Returns the words by which a command runs on a host, 0 or 1.
  Words on_host(int host) const {
    const Words with = {"env", "OMP_NUM_THREADS=1", "TESSERA_LOG_LEVEL=info"};
    return in_namespaces_ ? Words{"ip", "netns", "exec", lab_ + "-h" + std::to_string(host)} + with : with;
  }
  /// Waits until a launcher's workers have reported `count` steps in all.
  static void wait_for_steps(const Program& launcher, std::size_t count) {
    for (Deadline limit(std::chrono::seconds(60)); steps_told_of(launcher.out()).size() < count;) {
      ASSERT_FALSE(limit.passed()) << launcher.out() << launcher.err();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  const std::string lab_ = "tessera-ssh" + std::to_string(::getpid());
  bool in_namespaces_ = false;
};

TEST_F(Hosts, RanksStartedOverSshTrainToTheBitsOfPretendedHosts) {
  write_file(path("loopback hosts"), "127.0.0.1 slots=2 # this machine\n127.0.0.2:2\n");
  write_file(path("lab hosts"), "10.77.0.1 slots=2\n10.77.0.2:2\n");
  const Words by_file = on_two_hosts({"--hostfile", path("loopback hosts")}, {"--hostfile", path("lab hosts")});
  struct Case {
    const char* strategy;
    const char* more;
    Words command;
  };
  for (const Case& c : {Case{"FULL_SHARD", "", on_two_hosts()},
                        Case{"HYBRID_SHARD", R"(, "mesh": {"replicate": 2, "shard": 2})", by_file}}) {
    const std::string name = c.strategy, file = strategy(name, c.more);
    run(Words{"env", "OMP_NUM_THREADS=1"} + launch(4, {"--pretend-hosts", "2"}) + train(file, "pretended " + name));
    run(c.command + train(file, "over ssh " + name), 120);
    EXPECT_EQ(losses("over ssh " + name), losses("pretended " + name)) << name;
    EXPECT_EQ(losses("over ssh " + name).size(), 3u) << name;
  }
}

TEST_F(Hosts, UnequalHostsTrainToTheBitsOfOneHost) {
  const std::string file = strategy("FULL_SHARD");
  run(Words{"env", "OMP_NUM_THREADS=1"} + launch(3) + train(file, "here"));
  run(on_two_hosts({"--hosts", "127.0.0.1:1,127.0.0.2:2"}, {"--hosts", "10.77.0.1:1,10.77.0.2:2"}) +
          train(file, "over ssh"),
      120);
  EXPECT_EQ(losses("over ssh"), losses("here"));
  EXPECT_EQ(losses("over ssh").size(), 3u);
}

TEST_F(Hosts, KilledRankOfAnotherHostEndsTheJobAndIsTheFirstCause) {
  Program job(on_two_hosts() + train(strategy("FULL_SHARD"), "killed", {"--steps", "1000000"}), path("run"));
  wait_for(job, path("killed"), "\"step\":20,");
  const pid_t victim = job.rank_pid(3);
  ASSERT_GT(victim, 0);
  ASSERT_EQ(::kill(victim, SIGKILL), 0);
  const Ended ended = job.wait(60);
  EXPECT_EQ(ended.code, 128 + SIGKILL) << ended.err;
  const std::string host = in_namespaces_ ? "10.77.0.2" : "127.0.0.2";
  EXPECT_THAT(ended.err,
              HasSubstr("first cause: rank 3 (pid " + std::to_string(victim) + " on " + host + "): signal 9"));
  for (const int rank : {0, 1, 2}) EXPECT_EQ(job.rank_pid(rank), 0) << rank;
}

// The first host has the servers, and a worker that begins when the workers of the second host have ended.
TEST_F(Hosts, WorkersOfASecondHostJoinARunningJobAndTheirStepsAreDealtAgainWhenTheyGo) {
  constexpr int kSteps = 60;
  write_file(path("elastic.json"),
             R"({"strategy": "SHARD_OPTIMIZER", "units": {"classes": ["Block"]}, "gradient_sync": "last_microbatch",
                 "sync": {"type": "asynchronous", "owners": "servers", "elastic": true}})");
  Words command = train(path("elastic.json"), "metrics");
  command.resize(command.size() - 2);  // this drops `--metrics FILE`, which is refused with workers
  // Batches are large, so a worker that is killed is nearly always in the middle of a step.
  command = command + Words{"--steps", std::to_string(kSteps), "--batch", "64", "--save-weights", path("weights.pt")};
  const std::string begins_late = "until test -e '" + path("go") + R"('; do sleep 0.05; done; exec "$@")";
  Program first(on_host(0) +
                    Words{TESSERA_PROGRAM, "launch", "--workers", "1", "--servers", "2", "--address",
                          in_namespaces_ ? "10.77.0.1" : "127.0.0.2", "--secret", path("secret"), "--", "sh", "-c",
                          begins_late, "sh"} +
                    command,
                path("first"));
  const std::string at = address_to_join(first);
  const auto join = [&](const std::string& secret) {
    return on_host(1) + Words{TESSERA_PROGRAM, "launch", "--workers", "1", "--join", at, "--secret", secret, "--"} +
           command;
  };
  write_file(path("another"), "a secret of another job");
  std::filesystem::permissions(path("another"), std::filesystem::perms::owner_read);
  const Ended stranger = run_program(join(path("another")), path("run"));
  EXPECT_EQ(stranger.code, 77) << stranger.err;
  EXPECT_THAT(stranger.err, HasSubstr("the secret is another one"));

  Program stays(join(path("secret")), path("stays"));
  wait_for_steps(stays, 1);
  const pid_t worker = stays.rank_pid(0);
  ASSERT_GT(worker, 0);
  ASSERT_EQ(::kill(worker, SIGSTOP), 0);  // stopped, so that it does not make all steps while the next worker starts
  Program leaves(join(path("secret")), path("leaves"));
  wait_for_steps(leaves, 1);
  ASSERT_EQ(::kill(leaves.pid(), SIGKILL), 0) << "the launcher, with its worker";
  EXPECT_EQ(leaves.wait(60).code, 128 + SIGKILL);
  ASSERT_EQ(::kill(worker, SIGCONT), 0);
  wait_for_steps(stays, steps_told_of(stays.out()).size() + 2);  // the worker continues
  ASSERT_EQ(::kill(worker, SIGKILL), 0);
  const Ended killed = stays.wait(60);
  EXPECT_EQ(killed.code, 128 + SIGKILL);
  EXPECT_THAT(killed.err, HasSubstr("worker 0 has ended: signal 9"));

  write_file(path("go"), "");
  const Ended ended = first.wait(60);
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("they are dealt again"));
  const auto told = steps_told_of(ended.out + killed.out + leaves.out());
  for (const std::string& step : told) EXPECT_EQ(told.count(step), 1u) << step << " is made once";
  // A worker that is killed may have pushed a step that it can no longer report.
  EXPECT_GE(told.size(), std::size_t{kSteps - 2});
  EXPECT_THAT(told, Contains(std::to_string(kSteps) + "/" + std::to_string(kSteps)));
  EXPECT_TRUE(std::filesystem::exists(path("weights.pt")));
}

}  // namespace hosts_test
}  // namespace tessera::testing
