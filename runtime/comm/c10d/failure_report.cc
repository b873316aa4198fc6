#include "runtime/comm/c10d/failure_report.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/comm/c10d/in_time.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kForAllAnswers{1000};
constexpr std::chrono::milliseconds kForTheStore{2000};
constexpr std::size_t kMostAnswers = 8, kLongestAnswer = 500;  // in a message

std::string number_of(const CallSignature& call) { return "(#" + std::to_string(call.sequence) + ")"; }

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

struct FailureReport::Shared {
  const Group group;
  const std::shared_ptr<KeyValueStore> store;
  std::atomic<bool> store_hangs = false, is_asked = false;

  Shared(const Group& group, std::shared_ptr<KeyValueStore> store) : group(group), store(std::move(store)) {}

  std::string any_key() const { return "failed/" + group.key(); }
  std::string key(int member) const { return any_key() + "/" + std::to_string(member); }

  // Whatever the store says to this: it may be gone with the rank that failed.
  void publish(const std::string& text) const {
    if (auto published = store->has(key(group.rank)); published.ok() && !*published) {
      store->set(key(group.rank), text).IgnoreError();
      store->set(any_key(), "").IgnoreError();
    }
  }

  struct Answer {
    std::string text;        ///< empty: none
    bool has_ended = false;  ///< its program has, and well
  };
  std::vector<Answer> answers() const {
    std::vector<Answer> answers(group.size());
    const auto end = Clock::now() + kForAllAnswers;
    for (int q = 0; q < group.size(); ++q) {
      if (q == group.rank) continue;
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      answers[q].has_ended = store->has(key_of_ended_rank(group.world_rank(q))).value_or(false);
      if (answers[q].has_ended) continue;
      answers[q].text = store->get(key(q), std::max(left, std::chrono::milliseconds(0))).value_or("");
    }
    return answers;
  }
};

FailureReport::FailureReport(const Group& group, std::shared_ptr<KeyValueStore> store)
    : shared_(std::make_shared<Shared>(group, std::move(store))) {}
FailureReport::~FailureReport() = default;

void FailureReport::publish_call(const CallSignature& call) { publish("was in " + call.describe()); }

void FailureReport::publish_reason(const absl::Status& reason) { publish("gave up: " + message_of(reason)); }

void FailureReport::publish(const std::string& text) {
  if (!ends_in_time([shared = shared_, text] { shared->publish(text); }, kForTheStore)) shared_->store_hangs = true;
}

std::string FailureReport::news() {
  if (shared_->is_asked.exchange(true)) return "";  // the last question has not been answered yet
  const auto news = std::make_shared<std::string>();
  const auto ask = [shared = shared_, news] {
    if (shared->store->has(shared->any_key()).value_or(false)) *news = "another rank has failed";
    shared->is_asked = false;
  };
  return ends_in_time(ask, kForTheStore) ? *news : "";
}

absl::Status FailureReport::explain(const CallSignature& call, const std::string& why) {
  const Group& group = shared_->group;
  std::string text = group.self() + " " + where(call) + ": " + why;
  const auto answers = std::make_shared<std::vector<Shared::Answer>>();
  if (shared_->store_hangs ||
      !ends_in_time([shared = shared_, answers] { *answers = shared->answers(); }, kForTheStore))
    return make_error(ExitCode::kPeerLost, text + "; the store, and so rank 0, does not answer");
  ExitCode code = ExitCode::kPeerLost;
  std::vector<int> silent, ended;
  std::size_t told = 0;
  for (int q = 0; q < group.size(); ++q) {
    if (q == group.rank) continue;
    const std::string& answer = (*answers)[q].text;
    if ((*answers)[q].has_ended) {
      ended.push_back(group.world_rank(q));
      continue;
    }
    if (answer.empty()) {
      silent.push_back(group.world_rank(q));
      continue;
    }
    if (++told <= kMostAnswers) text += "; " + group.who(q) + " " + clipped(answer, kLongestAnswer);
    const bool is_a_call = answer.starts_with("was in ");
    if (is_a_call && answer != "was in " + call.describe() && ends_with(answer, number_of(call)))
      code = ExitCode::kInternal;
  }
  if (told > kMostAnswers) text += "; and " + std::to_string(told - kMostAnswers) + " more";
  if (!silent.empty())
    text += "; rank " + number_ranges(silent) + (silent.size() == 1 ? " does" : " do") + " not answer";
  if (!ended.empty()) {
    if (code == ExitCode::kPeerLost) code = ExitCode::kCorruptData;
    text += "; the program of rank " + number_ranges(ended) +
            " has ended. hint: every rank takes as many steps, and makes as many other calls, as the others";
  }
  if (code == ExitCode::kInternal) text += "; ranks disagree: every rank must make the same calls in the same order";
  return make_error(code, text);
}

}  // namespace tessera
