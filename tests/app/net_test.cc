// Tests training over a network. Hosts are network namespaces of this machine, joined by links of a chosen speed
// (scripts/net_lab). These tests are skipped, with the reason, if namespaces cannot be made.

#include <gmock/gmock.h>

#include <chrono>
#include <thread>

#include "tests/support/workplace.h"

namespace tessera::testing {
namespace net_test {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kSkipped = 77;
constexpr char kFast[] = "unlimited", kSlow[] = "100mbit";

class Net : public Workplace {
 protected:
  void SetUp() override {
    const Ended ended = run_program({TESSERA_NET_LAB, "run", "--", "true"}, path("run"));
    if (ended.code == kSkipped) GTEST_SKIP() << ended.err;
    ASSERT_EQ(ended.code, 0) << ended.err;
  }

  static Words lab(int hosts, int ranks_per_host, const std::string& rate) {
    // A rank alone on its host gets as few threads as ranks that share a host, since the number of threads changes the
    // bits of LibTorch's matrix products.
    return {"env",
            "OMP_NUM_THREADS=1",
            TESSERA_NET_LAB,
            "run",
            "--hosts",
            std::to_string(hosts),
            "--ranks-per-host",
            std::to_string(ranks_per_host),
            "--rate",
            rate,
            "--timeout",
            "120",
            "--"};
  }
};

TEST_F(Net, LossesOverNetworksEqualThoseOfOneHost) {
  struct Case {
    const char* strategy;
    int hosts, ranks_per_host;
    const char* rate;
    const char* more;
  };
  const Case cases[] = {{"NO_SHARD", 2, 1, kSlow, ""},
                        {"SHARD_GRADIENTS", 3, 1, kFast, R"(, "reductions_ahead": 2)"},
                        {"FULL_SHARD", 2, 1, kSlow, ""},
                        {"FULL_SHARD", 2, 2, kFast, ""},
                        {"HYBRID_SHARD", 2, 2, kSlow, R"(, "mesh": {"replicate": 2, "shard": 2})"}};
  for (const Case& c : cases) {
    const std::string what = std::string(c.strategy) + " on " + std::to_string(c.hosts) + " hosts of " +
                             std::to_string(c.ranks_per_host) + " ranks";
    const std::string file = strategy(c.strategy, c.more);
    run(launch(c.hosts * c.ranks_per_host) + train(file, "here " + what));
    run(lab(c.hosts, c.ranks_per_host, c.rate) + train(file, "net " + what), 150);
    EXPECT_EQ(losses("net " + what), losses("here " + what)) << what;
    EXPECT_EQ(losses("net " + what).size(), 3u) << what;
  }
}

/// Hosts that exist as long as this object.
class Hosts {
 public:
  explicit Hosts(const std::string& folder) : folder_(folder), name_("tessera-test" + std::to_string(::getpid())) {
    call({TESSERA_NET_LAB, "up", "--lab", name_, "--hosts", "2"});
  }
  ~Hosts() { call({TESSERA_NET_LAB, "down", "--lab", name_}); }
  Hosts(const Hosts&) = delete;
  Hosts& operator=(const Hosts&) = delete;

  const std::string& name() const { return name_; }
  void cut_off(int host) const { set_link(host, "down"); }
  void join_again(int host) const { set_link(host, "up"); }

 private:
  void set_link(int host, const std::string& state) const {
    call({"ip", "-n", name_ + "-h" + std::to_string(host), "link", "set", "lab0", state});
  }
  void call(const Words& command) const {
    const Ended ended = run_program(command, folder_);
    EXPECT_EQ(ended.code, 0) << ended.err;
  }

  const std::string folder_, name_;
};

TEST_F(Net, VanishedHostIsNamedInTime) {
  const std::string file = strategy("FULL_SHARD", R"(, "comm": {"timeout_s": 4})");
  const Hosts hosts(path("lab"));
  const Words command = Words{TESSERA_NET_LAB, "run", "--lab", hosts.name(), "--timeout", "60", "--"} +
                        train(file, "metrics", {"--steps", "100000", "--log-every", "1"});
  Program training(command, path("run"));
  for (Deadline limit(std::chrono::seconds(30)); training.out().find("loss") == std::string::npos && !limit.passed();)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  hosts.cut_off(1);
  const Ended ended = training.wait(50);
  EXPECT_EQ(ended.code, 75) << ended.err;
  EXPECT_TRUE(in_time(ended.seconds, 30)) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("rank 1"));
  EXPECT_THAT(ended.err, AnyOf(HasSubstr("does not answer"), HasSubstr("is gone"), HasSubstr("Timed out")))
      << ended.err;
}

class VanishedHost : public Net {
 protected:
  /// Cuts off one of two hosts with two ranks each, and expects that ranks end long before the time limit of 600 s.
  void expect_end_without(int host) {
    const std::string file = strategy("HYBRID_SHARD", R"(, "mesh": {"replicate": 2, "shard": 2})");
    const Hosts hosts(path("lab"));
    const Words on_hosts = {"env", "OMP_NUM_THREADS=1", TESSERA_NET_LAB, "run", "--lab", hosts.name()};
    const Words ranks = {"--ranks-per-host", "2", "--timeout", "120", "--"};
    Program training(on_hosts + ranks + train(file, "metrics", {"--steps", "100000", "--log-every", "1"}), path("run"));
    Deadline limit(std::chrono::seconds(30));
    while (training.out().find("loss") == std::string::npos && !limit.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    std::this_thread::sleep_for(std::chrono::seconds(2));  // each rank is watched by then
    hosts.cut_off(host);
    Deadline soon(std::chrono::seconds(35));  // 15 s for the first ranks, 10 s for the other ranks, and 10 s more
    const Ended ended = training.wait(100);
    EXPECT_FALSE(soon.passed()) << ended.err;
    EXPECT_EQ(ended.code, 75) << ended.err;
    EXPECT_THAT(ended.err, AnyOf(HasSubstr("does not answer"), HasSubstr("is gone"))) << ended.err;
  }
};

// Each process group waits for a different rank of the lost host. The rank before this host's first rank therefore
// tells the other ranks that all ranks of the host are lost.
TEST_F(VanishedHost, IsNamedLongBeforeTheTimeLimit) { expect_end_without(1); }

TEST_F(VanishedHost, WithTheStoreIsNamedLongBeforeTheTimeLimit) { expect_end_without(0); }

TEST_F(VanishedHost, OutageShorterThanTheKeySaysEndsNothing) {
  const std::string file = strategy("FULL_SHARD", R"(, "comm": {"outage_s": 60})");
  const Hosts hosts(path("lab"));
  const Words command = Words{TESSERA_NET_LAB, "run", "--lab", hosts.name(), "--timeout", "120", "--"} +
                        train(file, "metrics", {"--steps", "100000", "--log-every", "1"});
  Program training(command, path("run"));
  for (Deadline limit(std::chrono::seconds(30)); training.out().find("loss") == std::string::npos && !limit.passed();)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  std::this_thread::sleep_for(std::chrono::seconds(2));  // each rank is watched by then
  hosts.cut_off(1);
  std::this_thread::sleep_for(std::chrono::seconds(18));  // with the default outage_s the job would have ended by now
  hosts.join_again(1);
  const std::size_t said = training.out().size();
  for (Deadline limit(std::chrono::seconds(60)); training.out().size() <= said + 1000 && !limit.passed();)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_GT(training.out().size(), said + 1000) << training.err();
}

}  // namespace net_test
}  // namespace tessera::testing
