#include "engine/asynchronous/servers/keeping_thread.h"

#include <exception>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {

KeepingThread::KeepingThread(Keep keep) : keep_(std::move(keep)), thread_([this] { run(); }) {}

KeepingThread::~KeepingThread() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void KeepingThread::wake() {
  const MutexLock lock(mutex_);
  is_due_ = true;
  changed_.notify_all();
}

absl::Status KeepingThread::failure() const {
  const MutexLock lock(mutex_);
  return failure_;
}

void KeepingThread::run() {
  for (bool is_last = false; !is_last;) {
    {
      const MutexLock lock(mutex_);
      while (!is_due_ && !is_ending_) changed_.wait(mutex_);
      is_due_ = false;
      is_last = is_ending_;
    }
    absl::Status status;
    try {
      status = keep_(is_last);
    } catch (const std::exception& error) {  // there is no memory for a copy
      status = make_error(ExitCode::kOsResource, std::string("parameter server: a shard is not kept: ") + error.what() +
                                                     ". [T1004] hint: give the server more memory");
    }
    if (status.ok()) continue;
    log_error(message_of(status));
    const MutexLock lock(mutex_);
    failure_ = status;
    return;
  }
}

}  // namespace tessera
