#include "runtime/comm/work_watch.h"

#include <algorithm>
#include <exception>
#include <sstream>
#include <utility>

#include "runtime/comm/c10d_store.h"

namespace tessera {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr Seconds kBetweenLooks{0.1};
constexpr Seconds kBetweenQuestions{3.0};  // of all groups of all ranks, to one store

}  // namespace

WorkWatch::WorkWatch(Seconds timeout, std::function<bool()> peer_failed, Report report)
    : timeout_(timeout), peer_failed_(std::move(peer_failed)), report_(std::move(report)), thread_([this] { run(); }) {}

WorkWatch::~WorkWatch() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WorkWatch::add(const CallSignature& call, c10::intrusive_ptr<c10d::Work> work) {
  std::lock_guard lock(mutex_);
  started_.push_back({call, std::move(work)});
}

void WorkWatch::run() {
  const Seconds pause = std::min(kBetweenLooks, timeout_ / 4);
  oldest_since_ = next_question_ = Clock::now();
  for (std::unique_lock lock(mutex_); !changed_.wait_for(lock, pause, [&] { return ends_; });) {
    lock.unlock();
    const std::string why = look();
    lock.lock();
    if (why.empty()) continue;
    const CallSignature call = started_.front().call;
    lock.unlock();
    report_(call, why);
    return;
  }
}

std::string WorkWatch::look() {
  const Clock::time_point now = Clock::now();
  for (;;) {
    Started oldest;
    {
      std::lock_guard lock(mutex_);
      if (started_.empty()) {
        oldest_since_ = now;
        return "";
      }
      oldest = started_.front();
    }
    try {
      const bool over = oldest.work->isCompleted();
      if (const std::exception_ptr failure = oldest.work->exception()) std::rethrow_exception(failure);
      if (!over) break;
    } catch (const std::exception& error) {
      return text_of_c10_exception(error);
    }
    oldest_since_ = now;
    std::lock_guard lock(mutex_);
    started_.pop_front();
  }
  if (now - oldest_since_ > timeout_) {
    std::ostringstream text;
    text << "timed out after " << timeout_.count() << " s (comm.timeout_s sets the limit)";
    return text.str();
  }
  if (now < next_question_) return "";
  next_question_ = now + std::chrono::duration_cast<Clock::duration>(std::min(kBetweenQuestions, timeout_ / 2));
  return peer_failed_() ? "another rank has failed" : "";
}

}  // namespace tessera
