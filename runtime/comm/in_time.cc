#include "runtime/comm/in_time.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "runtime/base/mutex.h"

namespace tessera {

bool succeed_in_time(std::vector<std::function<bool()>> tasks, std::chrono::milliseconds limit, const InVain& in_vain) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kBetweenLooks{200};
  struct Ends {
    explicit Ends(std::size_t tasks) : left(tasks) {}
    Mutex mutex;
    CondVar changed;
    std::size_t left ABSL_GUARDED_BY(mutex);
    bool all_succeeded ABSL_GUARDED_BY(mutex) = true;
  };
  const auto ends = std::make_shared<Ends>(tasks.size());
  const auto note_end = [ends](bool succeeded) {
    const MutexLock lock(ends->mutex);
    --ends->left;
    ends->all_succeeded = ends->all_succeeded && succeeded;
    ends->changed.notify_all();
  };
  for (std::function<bool()>& task : tasks) {
    try {
      std::thread([note_end, task = std::move(task)] { note_end(task()); }).detach();
    } catch (const std::system_error&) {  // the system gives no more threads
      note_end(false);
    }
  }
  const auto deadline = Clock::now() + limit;
  auto next_look = in_vain ? std::min(deadline, Clock::now() + kForTheStore) : deadline;
  const MutexLock lock(ends->mutex);
  while (ends->left > 0) {
    if (ends->changed.wait_until(ends->mutex, next_look)) continue;
    if (next_look == deadline || in_vain()) break;
    next_look = std::min(deadline, Clock::now() + kBetweenLooks);
  }
  return ends->left == 0 && ends->all_succeeded;
}

bool ends_in_time(std::function<void()> task, std::chrono::milliseconds limit, const InVain& in_vain) {
  return succeed_in_time({[task = std::move(task)] {
                           task();
                           return true;
                         }},
                         limit, in_vain);
}

bool ask_in_time(const std::shared_ptr<KeyValueStore>& store, std::function<void(KeyValueStore&)> questions,
                 std::chrono::milliseconds limit, const InVain& in_vain) {
  enum class Question { kAsked, kAnswered, kLeftBehind };
  if (store->unanswered.load() > 0) return false;
  const auto question = std::make_shared<std::atomic<Question>>(Question::kAsked);
  const auto ask = [store, question, questions = std::move(questions)] {
    questions(*store);
    if (question->exchange(Question::kAnswered) == Question::kLeftBehind) --store->unanswered;
  };
  if (ends_in_time(ask, limit, in_vain)) return true;
  ++store->unanswered;
  if (question->exchange(Question::kLeftBehind) != Question::kAnswered) return false;
  --store->unanswered;  // the answer has just arrived
  return true;
}

bool OwnConnection::connect() {
  if (own_) return true;
  const auto made = std::make_shared<std::shared_ptr<KeyValueStore>>();
  if (!ask_in_time(shared_, [made](KeyValueStore& store) { *made = store.connected_anew(); })) return false;
  own_ = *made ? *made : shared_;
  return true;
}

}  // namespace tessera
