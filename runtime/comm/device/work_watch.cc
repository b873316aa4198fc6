#include "runtime/comm/device/work_watch.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "runtime/comm/c10d/c10d_store.h"

namespace tessera {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kBetweenLooks{0.1};
constexpr Seconds kBetweenQuestions{3.0};  // it is long, since all groups of all ranks ask one store

}  // namespace

WorkWatch::WorkWatch(Seconds timeout, c10::Device device, std::function<std::string()> news, Report report)
    : timeout_(timeout), device_(device), news_(std::move(news)), report_(std::move(report)), thread_([this] {
        run();
      }) {}

WorkWatch::~WorkWatch() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WorkWatch::add(const CallSignature& call, std::function<bool()> reached) {
  const MutexLock lock(mutex_);
  started_.push_back({call, std::move(reached), nullptr});
}

void WorkWatch::set_latest(c10::intrusive_ptr<c10d::Work> work) {
  const MutexLock lock(mutex_);
  if (work) {
    started_.back().work = std::move(work);
  } else {
    started_.pop_back();
  }
}

void WorkWatch::drain() {
  const MutexLock lock(mutex_);
  while (!started_.empty() && !has_reported_) changed_.wait(mutex_);
}

bool WorkWatch::pause(Seconds time) {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(time);
  const MutexLock lock(mutex_);
  while (!ends_ && changed_.wait_until(mutex_, end)) continue;
  return !ends_;
}

void WorkWatch::run() {
  const c10::DeviceGuard guard(device_);  // asking for an event on another device would make a context on that device
  const Seconds between_looks = std::min(kBetweenLooks, timeout_ / 4);
  oldest_since_ = next_question_ = Clock::now();
  while (pause(between_looks)) {
    const std::string why = look();
    if (why.empty()) continue;
    CallSignature call;
    {
      const MutexLock lock(mutex_);
      if (started_.empty()) continue;  // the call could not be started, and its caller reports that
      call = started_.front().call;
    }
    report_(call, why);
    const MutexLock lock(mutex_);
    has_reported_ = true;
    changed_.notify_all();
    return;
  }
}

std::string WorkWatch::look() try {
  const Clock::time_point now = Clock::now();
  for (;;) {
    Started oldest;
    {
      const MutexLock lock(mutex_);
      if (started_.empty()) {
        oldest_since_ = now;
        stands_in_ = 0;
        changed_.notify_all();
        return "";
      }
      oldest = started_.front();
    }
    const bool over = oldest.work && oldest.work->isCompleted();
    if (oldest.work && oldest.work->exception()) std::rethrow_exception(oldest.work->exception());
    if (!over) {
      const bool is_reached = oldest.reached();
      if (!is_reached) oldest_since_ = now;
      stands_in_ = is_reached ? oldest.call.sequence : 0;
      break;
    }
    oldest_since_ = now;
    const MutexLock lock(mutex_);
    started_.pop_front();
  }
  if (now - oldest_since_ > timeout_) {
    std::ostringstream text;
    text << "timed out after " << timeout_.count() << " s (comm.timeout_s sets the limit)";
    return text.str();
  }
  const Seconds between = std::min(kBetweenQuestions, timeout_ / 2);
  if (now - oldest_since_ < between || now < next_question_) return "";
  next_question_ = now + std::chrono::duration_cast<Clock::duration>(between);
  return news_();
} catch (const std::exception& error) {
  return text_of_c10_exception(error);
}

}  // namespace tessera
