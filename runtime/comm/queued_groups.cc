#include "runtime/comm/queued_groups.h"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <utility>
#include <vector>

#include "runtime/base/error.h"
#include "runtime/base/log.h"
#include "runtime/comm/in_time.h"

namespace tessera {
namespace {

constexpr std::chrono::seconds kForAborts{20};

}  // namespace

QueuedGroups::Place QueuedGroups::add(Member member) {
  const std::lock_guard lock(mutex_);
  return members_.insert(members_.end(), std::move(member));
}

void QueuedGroups::remove(Place place) {
  const std::lock_guard lock(mutex_);
  members_.erase(place);
}

absl::Status QueuedGroups::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

void QueuedGroups::end(const absl::Status& failure) {
  std::vector<Member> members;
  {
    const std::lock_guard lock(mutex_);
    if (!status_.ok()) return;
    status_ = failure;
    members.assign(members_.begin(), members_.end());
  }
  std::vector<std::function<bool()>> aborts;
  for (const Member& member : members) {
    member.tell(failure);
    aborts.push_back([backend = member.backend] {
      try {
        backend->abort();
        return true;
      } catch (const std::exception&) {
        return false;
      }
    });
  }
  members.clear();
  if (succeed_in_time(std::move(aborts), kForAborts)) return;
  log_error(message_of(failure) + "; its collectives cannot be aborted, so the process ends");
  std::_Exit(static_cast<int>(exit_code_of(failure)));
}

}  // namespace tessera
