#include "runtime/comm/compose/call_thread.h"

#include <utility>

namespace tessera {

CallThread::~CallThread() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
}

std::future<absl::Status> CallThread::push(std::function<absl::Status()> call) {
  const MutexLock lock(mutex_);
  if (!thread_.joinable()) thread_ = std::jthread([this] { run(); });
  ++left_;
  std::future<absl::Status> status = waiting_.emplace_back(std::move(call)).get_future();
  changed_.notify_all();
  return status;
}

void CallThread::wait_for_all() {
  const MutexLock lock(mutex_);
  while (left_ > 0) changed_.wait(mutex_);
}

void CallThread::run() {
  while (true) {
    std::packaged_task<absl::Status()> call;
    {
      const MutexLock lock(mutex_);
      while (!ends_ && waiting_.empty()) changed_.wait(mutex_);
      if (waiting_.empty()) return;
      call = std::move(waiting_.front());
      waiting_.pop_front();
    }
    call();
    call = {};  // everything that the call holds is freed before wait_for_all returns
    const MutexLock lock(mutex_);
    if (--left_ == 0) changed_.notify_all();
  }
}

}  // namespace tessera
