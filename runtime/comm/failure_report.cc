#include "runtime/comm/failure_report.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/error.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kForAllAnswers{1000};
constexpr std::chrono::milliseconds kForTheStore{2000};

// Runs `task` on a thread of its own and waits for it no longer than kForTheStore. The task may outlive this
// call, so it must own all it uses.
bool finished_in_time(std::function<void()> task) {
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto state = std::make_shared<Done>();
  std::thread([state, task = std::move(task)] {
    task();
    std::lock_guard lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  }).detach();
  std::unique_lock lock(state->mutex);
  return state->changed.wait_for(lock, kForTheStore, [&] { return state->done; });
}

std::string number_of(const CallSignature& call) { return "(#" + std::to_string(call.sequence) + ")"; }

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

struct FailureReport::Shared {
  const Group group;
  const std::shared_ptr<KeyValueStore> store;
  std::atomic<bool> store_hangs = false;

  Shared(const Group& group, std::shared_ptr<KeyValueStore> store) : group(group), store(std::move(store)) {}

  std::string key(int member) const { return "failed/" + group.key() + "/" + std::to_string(member); }

  // Whatever the store says to this: it may be gone with the rank that failed.
  void publish(const std::string& text) const {
    if (auto published = store->has(key(group.rank)); published.ok() && !*published)
      store->set(key(group.rank), text).IgnoreError();
  }

  std::vector<std::string> answers() const {
    std::vector<std::string> texts(group.size());
    const auto end = Clock::now() + kForAllAnswers;
    for (int q = 0; q < group.size(); ++q) {
      if (q == group.rank) continue;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      texts[q] = store->get(key(q), std::max(left, std::chrono::milliseconds(0))).value_or("");
    }
    return texts;
  }
};

FailureReport::FailureReport(const Group& group, std::shared_ptr<KeyValueStore> store)
    : shared_(std::make_shared<Shared>(group, std::move(store))) {}
FailureReport::~FailureReport() = default;

void FailureReport::publish_call(const CallSignature& call) { publish("was in " + call.describe()); }

void FailureReport::publish_reason(const absl::Status& reason) { publish("gave up: " + message_of(reason)); }

void FailureReport::publish(const std::string& text) {
  if (!finished_in_time([shared = shared_, text] { shared->publish(text); })) shared_->store_hangs = true;
}

absl::Status FailureReport::explain(const CallSignature& call, const std::string& why) {
  const Group& group = shared_->group;
  std::string text = group.self() + " " + where(call) + ": " + why;
  const auto answers = std::make_shared<std::vector<std::string>>();
  if (shared_->store_hangs ||
      !finished_in_time([shared = shared_, answers] { *answers = shared->answers(); }))
    return make_error(ExitCode::kPeerLost, text + "; the store, and so rank 0, does not answer");
  ExitCode code = ExitCode::kPeerLost;
  for (int q = 0; q < group.size(); ++q) {
    if (q == group.rank) continue;
    const std::string& answer = (*answers)[q];
    text += "; " + group.who(q) + " " + (answer.empty() ? "does not answer" : answer);
    if (answer != "was in " + call.describe() && ends_with(answer, number_of(call)))
      code = ExitCode::kInternal;
  }
  if (code == ExitCode::kInternal)
    text += "; ranks disagree: every rank must make the same calls in the same order";
  return make_error(code, text);
}

}  // namespace tessera
