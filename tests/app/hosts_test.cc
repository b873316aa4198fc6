// Tests `tessera launch --hosts`: training on hosts that are reached over ssh. tests/support/ssh/ssh_stand_in takes the
// place of ssh. Hosts are network namespaces (scripts/net_lab), or addresses of the loopback interface if namespaces
// cannot be made.

#include <gmock/gmock.h>
#include <signal.h>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace hosts_test {

using ::testing::AllOf;
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

}  // namespace hosts_test
}  // namespace tessera::testing
