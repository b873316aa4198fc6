#include "runtime/comm/in_time.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace tessera {

bool ends_in_time(std::function<void()> task, std::chrono::milliseconds limit) {
  struct End {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;
  };
  const auto end = std::make_shared<End>();
  std::thread([end, task = std::move(task)] {
    task();
    std::lock_guard lock(end->mutex);
    end->reached = true;
    end->changed.notify_all();
  }).detach();
  std::unique_lock lock(end->mutex);
  return end->changed.wait_for(lock, limit, [&] { return end->reached; });
}

}  // namespace tessera
