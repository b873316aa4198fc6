// Tests waits with a limit: for a store that does not answer, for other ranks, and for a connection.

#include "runtime/comm/in_time.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/meet_in_store.h"
#include "runtime/comm/socket_address.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

// Fault F4 (docs/faults.md): the rank that serves the store has stopped. The first caller waits for the rank. Other
// groups of the process do not wait again.
TEST(AskInTime, UnansweredStoreIsWaitedForOnlyOnce) {
  const std::shared_ptr<KeyValueStore> store = memory_store();
  const auto continued = std::make_shared<std::promise<void>>();
  const std::shared_future<void> goes_on = continued->get_future().share();
  EXPECT_FALSE(ask_in_time(
      store, [goes_on](KeyValueStore&) { goes_on.wait(); }, 20ms));
  bool is_asked = false;
  EXPECT_FALSE(ask_in_time(
      store, [&](KeyValueStore&) { is_asked = true; }, 1h))
      << "at once";
  EXPECT_FALSE(is_asked);
  continued->set_value();
  while (store->unanswered > 0) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(ask_in_time(
      store, [&](KeyValueStore& asked) { is_asked = asked.set("key", "value").ok(); }, 1h));
  EXPECT_TRUE(is_asked);
}

TEST(AskInTime, WaitInVainEndsBeforeItsLimit) {
  const std::shared_ptr<KeyValueStore> store = memory_store();
  const auto continued = std::make_shared<std::promise<void>>();
  const std::shared_future<void> goes_on = continued->get_future().share();
  int looks = 0;
  EXPECT_FALSE(ask_in_time(
      store, [goes_on](KeyValueStore&) { goes_on.wait(); }, 1h, [&] { return ++looks == 3; }));
  EXPECT_EQ(looks, 3);
  continued->set_value();
  while (store->unanswered > 0) std::this_thread::sleep_for(1ms);
}

/// A store in which another rank sets "wanted" and then gives up, just before this rank asks for any other key.
class StoreOfARankThatEnds final : public KeyValueStore {
 public:
  absl::StatusOr<bool> has(const std::string& key) override {
    if (key != "wanted") {
      TESSERA_RETURN_IF_ERROR(store_->set("wanted", "its value"));
      publish_given_up(*store_, "rank 1/2", make_error(ExitCode::kNoInput, "there are no data"));
    }
    return store_->has(key);
  }
  absl::Status set(const std::string& key, const std::string& value) override { return store_->set(key, value); }
  absl::StatusOr<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
    return store_->get(key, timeout);
  }
  absl::StatusOr<std::int64_t> add(const std::string& key, std::int64_t amount) override {
    return store_->add(key, amount);
  }

 private:
  const std::shared_ptr<KeyValueStore> store_ = memory_store();
};

TEST(GetFromOthers, RankThatGivesUpEndsTheWaitUnlessItHasSetTheKey) {
  StoreOfARankThatEnds store;
  EXPECT_EQ(get_from_others(store, "wanted", 1h, {}).value_or(""), "its value");
  const absl::Status other = get_from_others(store, "another", 1h, {}).status();
  EXPECT_EQ(exit_code_of(other), ExitCode::kPeerLost);
  EXPECT_FALSE(absl::IsDeadlineExceeded(other));
  EXPECT_THAT(message_of(other), ::testing::HasSubstr("rank 1/2 gave up: there are no data"));
}

// A profiler's signals must not make a host look silent.
TEST(ConnectInTime, SignalsDoNotShortenTheWait) {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  SocketAddress here = numeric_address("127.0.0.1", 0);
  ASSERT_EQ(bind(listener, here.raw(), here.length), 0);
  ASSERT_EQ(listen(listener, 0), 0);
  ASSERT_EQ(getsockname(listener, here.raw(), &here.length), 0);
  std::vector<int> waiting;  // connections that nobody accepts fill the queue, and then nobody answers
  for (Connected made = connect_in_time(here, 300ms); made.error == 0 && waiting.size() < 8;) {
    waiting.push_back(made.socket);
    made = connect_in_time(here, 300ms);
  }
  ASSERT_LT(waiting.size(), 8U);
  struct sigaction ignoring = {}, before = {};
  ignoring.sa_handler = [](int) {};
  sigaction(SIGALRM, &ignoring, &before);
  const itimerval often = {{0, 5000}, {0, 5000}}, never = {};
  setitimer(ITIMER_REAL, &often, nullptr);
  const auto begun = std::chrono::steady_clock::now();
  const Connected last = connect_in_time(here, 300ms);
  const auto taken = std::chrono::steady_clock::now() - begun;
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  EXPECT_EQ(last.error, ETIMEDOUT);
  EXPECT_GE(taken, 250ms);
  for (const int fd : waiting) close(fd);
  close(listener);
}

}  // namespace
}  // namespace tessera
