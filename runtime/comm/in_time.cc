#include "runtime/comm/in_time.h"

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace tessera {

bool succeed_in_time(std::vector<std::function<bool()>> tasks, std::chrono::milliseconds limit) {
  struct Ends {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t left;
    bool all_succeeded = true;
  };
  const auto ends = std::make_shared<Ends>();
  ends->left = tasks.size();
  for (std::function<bool()>& task : tasks) {
    std::thread([ends, task = std::move(task)] {
      const bool succeeded = task();
      std::lock_guard lock(ends->mutex);
      --ends->left;
      ends->all_succeeded = ends->all_succeeded && succeeded;
      ends->changed.notify_all();
    }).detach();
  }
  std::unique_lock lock(ends->mutex);
  return ends->changed.wait_for(lock, limit, [&] { return ends->left == 0; }) && ends->all_succeeded;
}

bool ends_in_time(std::function<void()> task, std::chrono::milliseconds limit) {
  return succeed_in_time({[task = std::move(task)] {
                           task();
                           return true;
                         }},
                         limit);
}

}  // namespace tessera
