// Kills ranks, workers and servers of asynchronous training in each operation of a push and of a pull. No rank waits
// for ever, no push is applied twice, and no rank pulls only a part of an update.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/asynchronous/servers/parameter_server.h"
#include "engine/asynchronous/servers/server_link.h"
#include "offload/files/fault_plan.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "tessera/elementwise_optimizer.h"
#include "tessera/error.h"
#include "tests/engine/asynchronous/counted_shard.h"
#include "tests/engine/asynchronous/served_runs.h"
#include "tests/engine/asynchronous/shard_rank.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace killed_operations_test {

using owned_shards_test::kRanks;
using owned_shards_test::Rank;
using servers_test::CountedShard;
using servers_test::RawWorker;
using servers_test::ServerProcess;
using ::testing::HasSubstr;

/// The number of the first layer's outputs. It is so large that two calls of a rule update a shard of the first layer,
/// and one call updates a shard of the second layer. Each shard has at least one whole page.
constexpr std::int64_t kHidden = 5000;
constexpr int kShards = 2 * kRanks, kCalls = 3 * kRanks;  // calls of the rule in a step

/// Subtracts 1 from each value, and kills the process in the call with the number `last`, before the call's values are
/// written.
class DyingRule final : public ElementwiseOptimizer {
 public:
  explicit DyingRule(int last) : last_(last) {}
  std::vector<std::string> states() const override { return {}; }
  void update(Elements& elements) const override {
    if (++calls_ == last_) ::raise(SIGKILL);
    elements.parameters.sub_(1);
  }

 private:
  const int last_;
  mutable int calls_ = 0;
};

/// Expects that each shard that the rank has pulled has the updates of whole pushes: all values are lower than
/// the first values by the same number.
void require_whole_shards(const Rank& rank, std::int64_t most) {
  for_each_trainable(rank.units(), [&](const FlatGroup& group) {
    const auto* const values = reinterpret_cast<const float*>(group.full);
    const std::int64_t part = group.layout.numel() / kRanks;
    for (std::int64_t begin = 0; begin < group.layout.numel(); begin += part) {
      const float pushes = owned_shards_test::first_value(begin) - values[begin];
      require(pushes >= 0 && pushes <= static_cast<float>(most), "no push is applied twice");
      for (std::int64_t i = begin; i < begin + part; ++i)
        require(values[i] == owned_shards_test::first_value(i) - pushes, "no shard is seen in part");
    }
  });
}

/// Makes the process die as soon as it writes to its copy of a shard's values. A pull writes to this copy.
void die_in_pull_of(const Rank& rank, int shard) {
  ::signal(SIGSEGV, [](int) { ::kill(::getpid(), SIGKILL); });
  int number = 0;
  for_each_trainable(rank.units(), [&](const FlatGroup& group) {
    const std::int64_t bytes = group.layout.numel() / kRanks * 4;
    for (int owner = 0; owner < kRanks; ++owner) {
      if (number++ != shard) continue;
      const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
      const auto first = reinterpret_cast<std::uintptr_t>(group.full + owner * bytes);
      const std::uintptr_t begin = (first + page - 1) / page * page,
                           end = (first + static_cast<std::uintptr_t>(bytes)) / page * page;
      require(begin < end, "a whole page of the shard");
      require(::mprotect(reinterpret_cast<void*>(begin), end - begin, PROT_NONE) == 0, "pages that nobody may write");
    }
  });
}

/// Trains on ranks that are processes, until rank 2 is killed. This happens in call `call` of its rule (from 1), or in
/// the pull of the shard `pulled` after a step. Expects that the other ranks end and name rank 2.
void expect_end_of_all(int call, int pulled) {
  const int port = free_port();
  ForkedRanks ranks(kRanks, [&](int number, KeyValueStore& store) -> absl::Status {
    join_as(number, kRanks, port);
    at::set_num_threads(1);
    const Mesh mesh = init();
    try {
      Rank rank(mesh, owned_shards_test::strategy_of(OptimizerType::kSgd, {}), /*timeout_s=*/60, kHidden);
      const ShardRule rule(owned_shards_test::strategy_of(OptimizerType::kOwn, {}),
                           OwnRules::of(std::make_shared<DyingRule>(number == 2 ? call : 0)), rank.rates());
      for (int step = 0;; ++step) {
        const std::int64_t begun = value_or_throw(store.add("begun", 1));
        if (number == 2 && step == 1 && call == 0) die_in_pull_of(rank, pulled);
        try {
          rank.step_by(rule);
        } catch (const Error&) {
          require_whole_shards(rank, value_or_throw(store.add("begun", 0)));
          throw;
        }
        require_whole_shards(rank, value_or_throw(store.add("begun", 0)));
        require(begun < 100'000, "the others notice it");
      }
    } catch (const Error& error) {
      return make_error(error.exit_code(), error.message());
    }
  });
  EXPECT_EQ(ranks.wait(2).signal, SIGKILL);
  for (int rank = 0; rank < 2; ++rank) {
    const RankEnd end = ranks.wait(rank);
    EXPECT_EQ(end.signal, 0) << rank;
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
    EXPECT_THAT(end.message, HasSubstr("rank 2"));
  }
}

// If a rank is killed while it holds a shard's lock, the next rank gets the lock and learns that its holder has died.
TEST(KilledOperations, RankKilledInAnyPartOfAPushEndsTheOthers) {
  const int first = tests_are_long() ? 1 : 2, stride = tests_are_long() ? 1 : 7;
  for (int call = first; call <= 2 * kCalls; call += stride) {  // call 2 is in the middle of a shard
    SCOPED_TRACE(call);
    expect_end_of_all(call, /*pulled=*/0);
  }
}

TEST(KilledOperations, RankKilledInAnyPullEndsTheOthers) {
  const int stride = tests_are_long() ? 1 : 4;
  for (int shard = 0; shard < kShards; shard += stride) {
    SCOPED_TRACE(shard);
    expect_end_of_all(/*call=*/0, shard);
  }
}

/// Pushes to the shard of a server that dies once at any time. Expects each push to be applied once.
void expect_each_push_once(const std::string& address) {
  constexpr int kPushes = 5;
  CountedShard shard(address);
  const absl::Status joined = shard.join();
  ASSERT_TRUE(joined.ok()) << message_of(joined);
  if (const absl::Status written = shard.write(); !written.ok()) {  // the server died with no values on its disk
    EXPECT_THAT(message_of(written), HasSubstr("has nothing of the run any more"));
    return;
  }
  for (int i = 0; i < kPushes; ++i) {
    const absl::Status pushed = shard.wait(shard.push(/*is_early=*/i % 2 == 1));
    EXPECT_TRUE(pushed.ok()) << message_of(pushed);
  }
  EXPECT_EQ(shard.pushes(), kPushes);
  EXPECT_EQ(shard.lost(), 0);
}

TEST(KilledOperations, ServerKilledInAnyOperationOfItsFilesLosesNothingAndAppliesNothingTwice) {
  for (const FaultSite site : {FaultSite::kOpen, FaultSite::kWrite, FaultSite::kFsync, FaultSite::kRename}) {
    for (std::int64_t nth = 1;; nth += tests_are_long() ? 1 : 3) {
      SCOPED_TRACE("operation " + std::to_string(nth) + " of site " + std::to_string(static_cast<int>(site)));
      const TestFolder folder;
      const std::string address = "127.0.0.1:" + std::to_string(free_port());
      const KeepOptions keep{folder.path(), /*lose=*/0};
      const FaultRule dies{.site = site, .path = "server-", .nth = nth, .action = FaultAction::kCrash, .number = 137};
      ServerProcess first(address, keep, {dies}), second(address, keep);
      first.start();
      {
        const std::jthread next([&](const std::stop_token& over) {
          while (!over.stop_requested() && !first.has_ended())
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          if (first.has_ended()) second.start();
        });
        expect_each_push_once(address);
      }
      if (!first.has_ended()) break;  // a run has no such operation
      if (!tests_are_long() && nth > 3) break;
      ASSERT_LT(nth, 1000);
    }
  }
}

/// How a message is cut when the server is killed.
enum class Cut {
  kHalfQuestion,   ///< half of a question has come
  kWholeQuestion,  ///< a whole question has come, and its answer may not have left
  kAnswer          ///< a question was answered, and the answer is lost
};

/// Connects a worker with a server, passes on whole messages between the two, and kills the server once.
class KillingBridge {
 public:
  /// `nth` is the number of the question, or of the answer, from 1. `kill` kills the server and starts the next one.
  KillingBridge(std::string server, Cut cut, int nth, std::function<void()> kill)
      : server_(std::move(server)),
        cut_(cut),
        nth_(nth),
        kill_(std::move(kill)),
        entry_(value_or_throw(listen_for_workers("127.0.0.1:0"))),
        thread_([this](const std::stop_token& over) { run(over); }) {}

  const std::string& address() const { return entry_.address; }
  bool has_killed() const { return has_killed_; }

 private:
  static constexpr std::chrono::milliseconds kLimit{10'000};
  static constexpr int kPollMs = 20;

  void run(const std::stop_token& over) {
    while (!over.stop_requested()) {
      pollfd entry{entry_.socket, POLLIN, 0};
      if (::poll(&entry, 1, kPollMs) <= 0) continue;
      const int socket = ::accept(entry_.socket, nullptr, nullptr);
      if (socket < 0) continue;
      ServerLink worker(socket);
      const auto server = ServerLink::connect(server_, ServerLink::Clock::now() + kLimit);
      if (server.ok()) pass_on(worker, **server, over);
    }
    ::close(entry_.socket);
  }

  /// Returns when either side ends its connection, or when the server was killed.
  void pass_on(ServerLink& worker, ServerLink& server, const std::stop_token& over) {
    while (!over.stop_requested()) {
      std::array<pollfd, 2> ends = {{{worker.socket(), POLLIN, 0}, {server.socket(), POLLIN, 0}}};
      if (::poll(ends.data(), ends.size(), kPollMs) <= 0) continue;
      const bool is_answer = ends[1].revents != 0;
      ServerLink& from = is_answer ? server : worker;
      const auto head = from.receive_head(kLimit);
      if (!head.ok()) return;
      std::vector<std::byte> message(sizeof(MessageHead) + static_cast<std::size_t>(head->bytes));
      std::memcpy(message.data(), &*head, sizeof(MessageHead));
      if (!from.receive(std::span(message).subspan(sizeof(MessageHead)), kLimit).ok()) return;
      const bool is_last = !has_killed_ && is_answer == (cut_ == Cut::kAnswer) && ++seen_ == nth_;
      std::size_t passed = message.size();
      if (is_last && cut_ == Cut::kHalfQuestion) passed /= 2;
      if (is_last && cut_ == Cut::kAnswer) passed = 0;
      if (!(is_answer ? worker : server).send(std::span(message).first(passed), kLimit).ok()) return;
      if (!is_last) continue;
      has_killed_ = true;
      return kill_();
    }
  }

  const std::string server_;
  const Cut cut_;
  const int nth_;
  const std::function<void()> kill_;
  const ServerSocket entry_;
  int seen_ = 0;
  std::atomic<bool> has_killed_ = false;
  std::jthread thread_;  // the thread uses the members above, so this member is destroyed first
};

TEST(KilledOperations, ServerKilledAtAnyMessageLosesNothingAndAppliesNothingTwice) {
  for (const Cut cut : {Cut::kHalfQuestion, Cut::kWholeQuestion, Cut::kAnswer}) {
    for (int nth = tests_are_long() ? 1 : 3;; nth += tests_are_long() ? 1 : 2) {
      SCOPED_TRACE("message " + std::to_string(nth) + ", cut " + std::to_string(static_cast<int>(cut)));
      const TestFolder folder;
      const std::string address = "127.0.0.1:" + std::to_string(free_port());
      const KeepOptions keep{folder.path(), /*lose=*/0};
      ServerProcess first(address, keep), second(address, keep);
      first.start();
      const KillingBridge bridge(address, cut, nth, [&] {
        first.kill();
        second.start();
      });
      expect_each_push_once(bridge.address());
      if (!bridge.has_killed()) break;  // a run has no such message
      if (!tests_are_long() && nth > 6) break;
      ASSERT_LT(nth, 1000);
    }
  }
}

/// Returns the payload of a push of ones to the shard of RawWorker, with a rate of 1 and a rule without means.
std::vector<std::byte> push_of_ones(RawWorker& worker) {
  std::vector<std::byte> push = worker.push_of_zeros();
  const std::vector<float> ones(worker.shard().second.size(), 1.0F);
  const std::size_t gradients = push.size() - ones.size() * sizeof(float);
  const PushedNumbers numbers{1, 0, 1, 0};
  std::memcpy(push.data(), &numbers, sizeof numbers);
  push[gradients - 1] = std::byte{1};  // the parameter has a gradient
  std::memcpy(push.data() + gradients, ones.data(), ones.size() * sizeof(float));
  return push;
}

TEST(KilledOperations, PushOfAWorkerKilledAtAnyByteIsNotApplied) {
  const servers_test::Servers servers(1);
  RawWorker stays(servers.address(0));
  EXPECT_EQ(stays.ask(MessageKind::kBegin).kind, MessageKind::kDone);
  const std::vector<std::byte> push = push_of_ones(stays);
  const auto before = stays.shard();
  const std::size_t stride = tests_are_long() ? 1 : 61;
  for (std::size_t cut = 0; cut < push.size(); cut += stride) {
    RawWorker dies(servers.address(0));
    dies.send(MessageKind::kPush, static_cast<std::int64_t>(push.size()), std::span(push).first(cut));
  }
  EXPECT_EQ(stays.shard(), before);
  const MessageHead answer = stays.ask(MessageKind::kPush, push);
  EXPECT_EQ(answer.kind, MessageKind::kDone);
  EXPECT_EQ(answer.first, 0) << "no push was applied before";
  const auto [version, values] = stays.shard();
  EXPECT_EQ(version, 1);
  for (const float value : values) EXPECT_EQ(value, values[0]) << "the push is applied to all of the shard";
  EXPECT_NE(values[0], before.second[0]);
}

TEST(KilledOperations, StoppedServerAnswersWhenItGoesOnAndIsNamedAfterTheTimeout) {
  const TestFolder folder;
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  ServerProcess server(address, {folder.path(), /*lose=*/0});
  server.start();
  CountedShard shard(address, /*limit=*/std::chrono::seconds(2));
  ASSERT_TRUE(shard.join().ok());
  ASSERT_TRUE(shard.write().ok());
  EXPECT_TRUE(shard.wait(shard.push()).ok());
  server.signal(SIGSTOP);
  const auto pushed = shard.push();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  server.signal(SIGCONT);
  EXPECT_TRUE(shard.wait(pushed).ok());
  EXPECT_EQ(shard.pushes(), 2);
  server.signal(SIGSTOP);
  const absl::Status late = shard.wait(shard.push());
  EXPECT_EQ(exit_code_of(late), ExitCode::kPeerLost);
  EXPECT_THAT(message_of(late), HasSubstr("server 0 is lost: no answer within 2 s"));
}

}  // namespace killed_operations_test
}  // namespace tessera::testing
