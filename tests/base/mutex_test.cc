// Tests Mutex and CondVar among threads.

#include "runtime/base/mutex.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

namespace tessera {
namespace {

struct Counter {
  Mutex mutex;
  CondVar changed;
  int count ABSL_GUARDED_BY(mutex) = 0;
};

TEST(Mutex, IncrementsUnderTheLockLoseNoCount) {
  Counter counter;
  const auto count = [&] {
    for (int i = 0; i < 1000; ++i) {
      const MutexLock lock(counter.mutex);
      ++counter.count;
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back(count);
  threads.clear();  // joins the threads
  const MutexLock lock(counter.mutex);
  EXPECT_EQ(counter.count, 4000);
}

TEST(CondVar, NotifiedThreadsTakeTurns) {
  Counter counter;
  const auto take_turns = [&](int first) {
    for (int turn = first; turn < 100; turn += 2) {
      const MutexLock lock(counter.mutex);
      while (counter.count != turn) counter.changed.wait(counter.mutex);
      ++counter.count;
      counter.changed.notify_all();
    }
  };
  { const std::jthread even(take_turns, 0), odd(take_turns, 1); }
  const MutexLock lock(counter.mutex);
  EXPECT_EQ(counter.count, 100);
}

TEST(CondVar, UnnotifiedWaitEndsAtTheDeadlineHoldingTheMutex) {
  Counter counter;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  {
    const MutexLock lock(counter.mutex);
    while (counter.changed.wait_until(counter.mutex, deadline)) continue;
    ++counter.count;
  }
  EXPECT_GE(std::chrono::steady_clock::now(), deadline);
  const MutexLock lock(counter.mutex);  // the mutex is free again
  EXPECT_EQ(counter.count, 1);
}

}  // namespace
}  // namespace tessera
