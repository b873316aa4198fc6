// Tests that a process waits once for a store that does not answer.

#include "runtime/comm/in_time.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>

namespace tessera {
namespace {

using namespace std::chrono_literals;

// Fault F4 (docs/faults.md): the rank that serves the store stands still. The first caller waits for it; other groups
// of the process do not wait again.
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

}  // namespace
}  // namespace tessera
