#include "runtime/base/process/on_threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/base/mutex.h"

namespace tessera {

void on_threads(std::size_t count, std::size_t threads, const std::function<void(std::size_t)>& task) {
  std::atomic<std::size_t> next = 0;
  Mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (std::size_t i = next++; i < count; i = next++) task(i);
    } catch (...) {
      const MutexLock lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  };
  constexpr std::size_t kMostThreads = 8;  // each of these may start threads of LibTorch
  std::vector<std::thread> others;
  try {
    for (std::size_t i = 1; i < std::min({count, threads, kMostThreads}); ++i) others.emplace_back(work);
  } catch (const std::system_error&) {  // the system gives no more threads, so the existing threads do the rest
  }
  work();
  for (std::thread& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tessera
