#include "workshop/launch/hosts/heartbeat.h"

#include <unistd.h>

#include <string>

#include "workshop/launch/hosts/frames.h"

namespace tessera {

Heartbeat::~Heartbeat() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Heartbeat::add(int pipe) {
  const MutexLock lock(mutex_);
  pipes_.push_back(pipe);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void Heartbeat::remove(int pipe) {
  const MutexLock lock(mutex_);
  std::erase(pipes_, pipe);
}

void Heartbeat::run() {
  const std::string beat = encode({FrameType::kAlive, 0, ""});
  const MutexLock lock(mutex_);
  while (!ends_) {
    for (const int pipe : pipes_) [[maybe_unused]] const ssize_t written = ::write(pipe, beat.data(), beat.size());
    const auto next = std::chrono::steady_clock::now() + every_;
    while (!ends_ && changed_.wait_until(mutex_, next)) continue;
  }
}

}  // namespace tessera
