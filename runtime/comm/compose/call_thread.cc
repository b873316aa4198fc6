#include "runtime/comm/compose/call_thread.h"

#include <utility>

namespace tessera {

CallThread::~CallThread() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
}

std::future<absl::Status> CallThread::push(std::function<absl::Status()> call) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::jthread([this] { run(); });
  ++left_;
  std::future<absl::Status> status = waiting_.emplace_back(std::move(call)).get_future();
  changed_.notify_all();
  return status;
}

void CallThread::wait_for_all() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return left_ == 0; });
}

void CallThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ends_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    std::packaged_task<absl::Status()> call = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    call();
    lock.lock();
    if (--left_ == 0) changed_.notify_all();
  }
}

}  // namespace tessera
