#pragma once

// The servers, strategies and runs that tests of "sync": {"type": "asynchronous", "owners": "servers"} share. Servers
// are threads of the test's process, or processes of their own. Ranks are threads or processes.

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/asynchronous/servers/job_members.h"
#include "engine/asynchronous/servers/parameter_server.h"
#include "engine/asynchronous/servers/server_link.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/update_options.h"
#include "offload/files/fault_plan.h"
#include "runtime/border/throw.h"
#include "tessera/collectives.h"
#include "tests/engine/asynchronous/order_oracle.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/free_port.h"
#include "tests/support/session.h"

namespace tessera::testing::servers_test {

inline constexpr int kRanks = 3, kServers = 2;
inline constexpr char kSecret[] = "a secret of this test";

/// Names parameter servers and their secret in the environment while this object lives.
class NamedServers {
 public:
  explicit NamedServers(const std::string& addresses) {
    setenv("TESSERA_SERVERS", addresses.c_str(), 1);
    setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
  }
  ~NamedServers() {
    unsetenv("TESSERA_SERVERS");
    unsetenv("TESSERA_SERVERS_SECRET");
  }
  NamedServers(const NamedServers&) = delete;
  NamedServers& operator=(const NamedServers&) = delete;
};

/// Names a server at a port of this host while this object lives. The server may start later.
struct NamedServer {
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  const NamedServers named{address};
};

/// Parameter servers, which the environment names while this object lives.
class Servers {
 public:
  explicit Servers(int count = kServers, const std::string& offload = "") {
    std::string all;
    for (int i = 0; i < count; ++i) {
      servers_.push_back(value_or_throw(ParameterServer::start("127.0.0.1:0", kSecret, {}, offload)));
      all += (i == 0 ? "" : ",") + servers_.back()->address();
    }
    named_.emplace(all);
  }

  void end(std::size_t server) { servers_[server].reset(); }
  const std::string& address(std::size_t server) const { return servers_[server]->address(); }

 private:
  std::vector<std::unique_ptr<ParameterServer>> servers_;
  std::optional<NamedServers> named_;
};

inline void sgd(Strategy& s) {
  s.optimizer = {.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0, .momentum = 0.9};
}

inline Strategy served(const Adjust& adjust = nullptr) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kShardOptimizer);
  strategy.host_sharing = true;
  strategy.gradient_clipping = 0;
  strategy.sync.type = SyncType::kAsynchronous;
  strategy.sync.asynchronous.owners = ShardOwners::kServers;
  if (adjust) adjust(strategy);
  return strategy;
}

inline Strategy elastic(const Adjust& adjust = nullptr) {
  Strategy strategy = served(adjust);
  strategy.sync.asynchronous.elastic = true;
  return strategy;
}

struct Ran {
  std::vector<std::vector<double>> losses;  ///< [rank][step]
  std::int64_t oldest = 0;
  Values values;  ///< the values after all ranks have pushed
};

inline Ran run(const Strategy& strategy, std::size_t steps, int ranks = kRanks, const OrderOption& option = {}) {
  Ran result;
  result.losses.resize(static_cast<std::size_t>(ranks));
  std::vector<std::int64_t> oldest(static_cast<std::size_t>(ranks));
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy, option.model);
    const auto rank = static_cast<std::size_t>(mesh.rank());
    for (std::size_t i = 0; i < steps; ++i) {
      const StepResult step = make_step(session, option, i);
      result.losses[rank].push_back(step.loss);
      oldest[rank] = std::max(oldest[rank], step.staleness_max);
    }
    barrier(mesh);
    Values values = session.values();
    if (rank == 0) result.values = std::move(values);
  });
  result.oldest = *std::ranges::max_element(oldest);
  return result;
}

/// A worker whose messages are all written by a test. It joins an elastic run with one parameter of 64 numbers.
/// `server` is the number of the server at `address`, which is the run's last server. `number` is the worker's number.
class RawWorker {
 public:
  explicit RawWorker(const std::string& address, int server = 0, int number = JobMembers::kAnyNumber)
      : link_(value_or_throw(ServerLink::connect(address, ServerLink::Clock::now() + kLimit))) {
    const std::string secret = kSecret;
    EXPECT_EQ(ask(MessageKind::kSecret, std::as_bytes(std::span(secret))).kind, MessageKind::kDone);
    const std::string definition = std::string(32, '-') + definition_for(server).dump();
    place = ask(MessageKind::kJoin, std::as_bytes(std::span(definition)), /*first=*/number);
  }

  static nlohmann::json definition_for(int server) {
    const std::vector<std::int64_t> numels = {64}, options = {-1};
    const nlohmann::json group = {{"unit", "a"},      {"unit_index", 0}, {"group", 0},
                                  {"numels", numels}, {"parts", 1},      {"options", options}};
    return {{"ranks", 1},
            {"server", server},
            {"servers", server + 1},
            {"timeout_s", 10},
            {"strategy", elastic().to_json()},
            {"groups", nlohmann::json::array({group})}};
  }

  MessageHead ask(MessageKind kind, std::span<const std::byte> payload = {}, std::int64_t first = 0) {
    send(kind, static_cast<std::int64_t>(payload.size()), payload, first);
    return value_or_throw(link_->receive_head(kLimit));
  }
  /// Sends a message head that announces `bytes` bytes, and then `payload`.
  void send(MessageKind kind, std::int64_t bytes, std::span<const std::byte> payload, std::int64_t first = 0,
            std::uint32_t shard = 0) {
    MessageHead head;
    head.kind = kind;
    head.bytes = bytes;
    head.first = first;
    head.shard = shard;
    require(link_->send(bytes_of(head), kLimit).ok(), "it is sent");
    link_->send(payload, kLimit).IgnoreError();  // the server may have ended the connection
  }
  /// Returns the payload of a push of zeros to the shard.
  std::vector<std::byte> push_of_zeros() {
    const OptimizerConfig optimizer = elastic().optimizer;
    const std::size_t numbers = LearningRates(optimizer).all().size() + UpdateOptions(optimizer).all().size();
    const std::size_t elements = shard().second.size();
    return std::vector<std::byte>(sizeof(PushedNumbers) + numbers * sizeof(double) + 1 + elements * sizeof(float));
  }
  /// Returns whether the server ends the connection without an answer.
  bool is_dropped() { return !link_->receive_head(kLimit).ok(); }
  /// Returns the version and the numbers of the shard.
  std::pair<std::int64_t, std::vector<float>> shard() {
    const MessageHead head = ask(MessageKind::kCopy);
    std::vector<float> numbers(static_cast<std::size_t>(head.bytes) / sizeof(float));
    require(link_->receive(std::as_writable_bytes(std::span(numbers)), kLimit).ok(), "it has come");
    return {head.first, numbers};
  }

  MessageHead place;

 private:
  static constexpr std::chrono::milliseconds kLimit{10'000};
  std::unique_ptr<ServerLink> link_;
};

/// A parameter server in a process of its own, which can be killed. The process waits until the server is started, so
/// that all processes can be forked before the test has threads.
class ServerProcess {
 public:
  /// `faults` has rules for the files of the server.
  ServerProcess(const std::string& address, const KeepOptions& keep, const std::vector<FaultRule>& faults = {}) {
    require(::pipe(starts_.data()) == 0, "a pipe");
    pid_ = ::fork();
    if (pid_ != 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // the server dies with the test, however the test ends
    char word = 0;
    ::close(starts_[1]);
    if (::read(starts_[0], &word, 1) != 1) ::_exit(0);
    setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
    std::optional<ScopedFaults> plan;
    if (!faults.empty()) plan.emplace(faults);
    const auto server = ParameterServer::start(address, kSecret, keep);
    if (!server.ok()) ::_exit(1);
    for (;;) ::pause();
  }
  ~ServerProcess() {
    kill();
    for (const int end : starts_) ::close(end);
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  void start() const { require(::write(starts_[1], "s", 1) == 1, "a server that waits"); }
  void signal(int number) const { ::kill(pid_, number); }
  /// Stops the process by SIGSTOP. Returns when the process has stopped.
  void stop() const {
    signal(SIGSTOP);
    int status = 0;
    require(::waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status), "a server that stands still");
  }
  /// Returns whether the process has ended by itself, or was killed.
  bool has_ended() {
    if (pid_ > 0 && ::waitpid(pid_, nullptr, WNOHANG) == pid_) pid_ = 0;
    return pid_ == 0;
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }

 private:
  std::array<int, 2> starts_{};
  pid_t pid_ = 0;
};

}  // namespace tessera::testing::servers_test
