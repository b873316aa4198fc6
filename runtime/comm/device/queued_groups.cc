#include "runtime/comm/device/queued_groups.h"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/comm/in_time.h"

namespace tessera {
namespace {

constexpr std::chrono::seconds kForTelling{3}, kForAborts{20};

}  // namespace

QueuedGroups::Place QueuedGroups::add(Member member) {
  const MutexLock lock(mutex_);
  return members_.insert(members_.end(), std::move(member));
}

void QueuedGroups::remove(Place place) {
  const MutexLock lock(mutex_);
  members_.erase(place);
}

absl::Status QueuedGroups::status() const {
  const MutexLock lock(mutex_);
  return status_;
}

void QueuedGroups::end(const absl::Status& failure) {
  std::vector<std::function<bool()>> tells, aborts;
  {
    const MutexLock lock(mutex_);
    if (!status_.ok()) {
      while (!have_ended_) changed_.wait(mutex_);
      return;
    }
    status_ = failure;
    for (const Member& member : members_) {
      tells.push_back([tell = member.tell, failure] {
        tell(failure);
        return true;
      });
      aborts.push_back([backend = member.backend] {
        try {
          backend->abort();
          return true;
        } catch (const std::exception&) {
          return false;
        }
      });
    }
  }
  succeed_in_time(std::move(tells), kForTelling);  // peers are told, as far as the store answers
  if (!succeed_in_time(std::move(aborts), kForAborts)) {
    log_error(message_of(failure) + "; its collectives cannot be aborted, so the process ends");
    std::_Exit(static_cast<int>(exit_code_of(failure)));
  }
  const MutexLock lock(mutex_);
  have_ended_ = true;
  changed_.notify_all();
}

}  // namespace tessera
