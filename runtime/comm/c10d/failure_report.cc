// A member of a group that fails writes its failure to the store, under a key of its own, and then adds itself to the
// group's list of failed members. A member that wants to know reads lists (KeyValueStore::listed) until each other
// member has failed or ended, for one second at most. It then reads all failures at once. So the number of its requests
// depends on that second, and not on the size of the group.

#include "runtime/comm/c10d/failure_report.h"

#include <absl/strings/numbers.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/in_time.h"
#include "runtime/comm/next_rank.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kForAllAnswers{1000};
/// Pauses between questions for answers.
constexpr std::chrono::milliseconds kFirstPauseForAnswers{2}, kLongestPauseForAnswers{100};
/// The rank that serves the store stays for at most this time. Ranks that give up a little later can then still read
/// the store.
constexpr std::chrono::milliseconds kForLateRanks{3000};
constexpr std::size_t kMostAnswers = 8, kLongestAnswer = 800;  // limits: answers in a message, bytes of an answer

constexpr const char* kHintOfSilence =
    ". [T0433] hint: a rank that does not answer stands still (state T in `ps`: stopped), computes for longer than the "
    "limit, or was killed, and then its launcher says by what";

constexpr const char* kHintOfAbsence =
    ". [T0434] hint: a rank that has started and does not come is elsewhere: all ranks must make the same groups, so "
    "the same Engines, in the same order";

std::string number_of(const CallSignature& call) { return "(#" + std::to_string(call.sequence) + ")"; }

/// Returns the numbers of a list of the store that are below `end`. Other texts come from no rank of this job.
absl::StatusOr<std::vector<int>> numbers_listed(KeyValueStore& store, const std::string& list, int end) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> texts, store.listed(list));
  std::vector<int> numbers;
  for (const std::string& text : texts) {
    int number = -1;
    if (absl::SimpleAtoi(text, &number) && 0 <= number && number < end) numbers.push_back(number);
  }
  return numbers;
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

}  // namespace

/// The answers of the other ranks of a group, by member.
struct FailureReport::Answers {
  struct Answer {
    std::string text;         ///< "": no answer
    bool has_come = false;    ///< whether the rank has begun to connect
    bool has_ended = false;   ///< whether the rank's program has ended without an error
    bool has_failed = false;  ///< whether the rank has published a failure
  };
  std::vector<Answer> of;
  bool store_is_gone = false;  ///< true: some ranks could not be asked
};

struct FailureReport::Shared {
  const Group group;
  const std::shared_ptr<KeyValueStore> store;

  Shared(const Group& group, std::shared_ptr<KeyValueStore> store) : group(group), store(std::move(store)) {}

  /// Returns the name of the process that serves the store.
  std::string server() const {
    const auto* const of_c10d = dynamic_cast<const C10dStore*>(store.get());
    return of_c10d ? of_c10d->server() : "rank 0";
  }
  /// The list of members that have published a failure. The failure itself has the key of the member.
  std::string any_key() const { return "failed/" + group.key(); }
  std::string key(int member) const { return any_key() + "/" + std::to_string(member); }
  /// The list of members that have begun to connect.
  std::string arrivals() const { return "came/" + group.key(); }
  std::string heard_key(int member) const { return "heard/" + group.key() + "/" + std::to_string(member); }

  /// Writes to the store that this rank has read the answers. If this rank serves the store, the store ends with this
  /// rank. This function then waits until the other ranks have read the answers too, but no longer than kForLateRanks.
  void let_others_hear(const Answers& answers) const {
    store->set(heard_key(group.rank), "").IgnoreError();
    if (group.world_rank(group.rank) != 0 || server() != "rank 0") return;
    const auto end = Clock::now() + kForLateRanks;
    for (int q = 0; q < group.size(); ++q) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
      if (q == group.rank || !answers.of[q].has_come || answers.of[q].has_ended || left.count() <= 0) continue;
      store->get(heard_key(q), left).status().IgnoreError();
    }
  }

  // Publishes a failure. Errors of the store are ignored, since the store may have ended with the rank that failed.
  void publish(const std::string& text) const {
    if (auto published = store->has(key(group.rank)); published.ok() && !*published) {
      if (store->set(key(group.rank), text).ok())
        store->append(any_key(), std::to_string(group.rank)).IgnoreError();  // the key of a listed member exists
    }
  }

  // The number of requests does not depend on the number of ranks, since all ranks may ask at the same time.
  void ask_all(Answers& answers) const {
    const auto end = Clock::now() + kForAllAnswers;
    for (auto pause = kFirstPauseForAnswers;; pause = std::min(2 * pause, kLongestPauseForAnswers)) {
      answers.store_is_gone = !ask(answers.of).ok();
      if (answers.store_is_gone || have_all_answered(answers.of) || Clock::now() >= end) break;
      std::this_thread::sleep_until(std::min(Clock::now() + pause, end));
    }
    if (!answers.store_is_gone) answers.store_is_gone = !read(answers.of).ok();
  }

  /// Learns which members have ended or failed so far.
  absl::Status ask(std::vector<Answers::Answer>& of) const {
    TESSERA_ASSIGN_OR_RETURN(const std::vector<int> ended, numbers_listed(*store, kEndedRanks, group.world_size));
    for (const int rank : ended) {
      const auto member = std::ranges::lower_bound(group.world_ranks, rank);
      if (member == group.world_ranks.end() || *member != rank) continue;
      of[static_cast<std::size_t>(member - group.world_ranks.begin())].has_ended = true;
    }
    TESSERA_ASSIGN_OR_RETURN(const std::vector<int> failed, numbers_listed(*store, any_key(), group.size()));
    for (const int member : failed) of[static_cast<std::size_t>(member)].has_failed = true;
    return absl::OkStatus();
  }

  bool have_all_answered(const std::vector<Answers::Answer>& of) const {
    for (int q = 0; q < group.size(); ++q) {
      const Answers::Answer& answer = of[static_cast<std::size_t>(q)];
      if (q != group.rank && !answer.has_ended && !answer.has_failed) return false;
    }
    return true;
  }

  /// Reads the failures of the members that have published one and have not ended, and which members have arrived.
  absl::Status read(std::vector<Answers::Answer>& of) const {
    std::vector<std::string> keys;
    std::vector<Answers::Answer*> asked;
    for (int q = 0; q < group.size(); ++q) {
      Answers::Answer& answer = of[static_cast<std::size_t>(q)];
      if (q == group.rank || answer.has_ended || !answer.has_failed) continue;
      keys.push_back(key(q));
      asked.push_back(&answer);
    }
    TESSERA_ASSIGN_OR_RETURN(std::vector<std::string> texts, store->get_all(keys));
    for (std::size_t i = 0; i < std::min(asked.size(), texts.size()); ++i) asked[i]->text = std::move(texts[i]);
    TESSERA_ASSIGN_OR_RETURN(const std::vector<int> come, numbers_listed(*store, arrivals(), group.size()));
    for (const int member : come) of[static_cast<std::size_t>(member)].has_come = true;
    return absl::OkStatus();
  }
};

FailureReport::FailureReport(const Group& group, std::shared_ptr<KeyValueStore> store)
    : shared_(std::make_shared<Shared>(group, std::move(store))) {}
FailureReport::~FailureReport() = default;

bool FailureReport::ask_all(const std::shared_ptr<Answers>& answers) {
  answers->of.resize(static_cast<std::size_t>(shared_->group.size()));
  return ask_in_time(shared_->store, [shared = shared_, answers](KeyValueStore&) { shared->ask_all(*answers); });
}

void FailureReport::publish_arrival() {
  ask_in_time(shared_->store, [shared = shared_](KeyValueStore& store) {
    store.append(shared->arrivals(), std::to_string(shared->group.rank)).IgnoreError();
  });
}

absl::Status FailureReport::explain_arrival(const std::string& why) {
  const Group& group = shared_->group;
  publish("gave up: " + why);
  const auto answers = std::make_shared<Answers>();
  if (!ask_all(answers)) return make_error(ExitCode::kPeerLost, why + "; " + silent_server());
  if (answers->store_is_gone) return make_error(ExitCode::kPeerLost, why + "; " + gone_server());
  ask_in_time(
      shared_->store, [shared = shared_, answers](KeyValueStore&) { shared->let_others_hear(*answers); },
      kForLateRanks + kForTheStore);
  std::vector<int> absent, silent;
  for (int q = 0; q < group.size(); ++q) {
    if (q == group.rank || answers->of[q].has_ended) continue;
    if (!answers->of[q].has_come && answers->of[q].text.empty()) absent.push_back(group.world_rank(q));
    if (answers->of[q].text.empty()) silent.push_back(group.world_rank(q));
  }
  std::string text = why;
  if (!absent.empty())
    text += "; rank " + number_ranges(absent) + (absent.size() == 1 ? " has" : " have") + " not come" + kHintOfAbsence;
  else if (!silent.empty())
    text += "; rank " + number_ranges(silent) + (silent.size() == 1 ? " does" : " do") + " not answer" + kHintOfSilence;
  return make_error(ExitCode::kPeerLost, text);
}

std::string FailureReport::silent_server() const {
  return "the store, and so " + shared_->server() + ", does not answer" + kHintOfSilence;
}

std::string FailureReport::gone_server() const {
  return shared_->server() +
         " is gone, which serves the store. [T0435] hint: what it printed last, or its launcher, says why it ended; or "
         "its host cannot be reached any more";
}

void FailureReport::publish_call(const CallSignature& call) { publish("was in " + call.describe()); }

void FailureReport::publish_reason(const absl::Status& reason) { publish("gave up: " + message_of(reason)); }

void FailureReport::publish(const std::string& text) {
  ask_in_time(shared_->store, [shared = shared_, text](KeyValueStore&) { shared->publish(text); });
}

bool FailureReport::is_left_alone(Collectives::HasKey has_key) const {
  const Group& group = shared_->group;
  const absl::StatusOr<bool> has_failed = has_key(shared_->any_key());
  if (!has_failed.ok()) return shared_->server() == "rank 0" && group.rank != 0 && group.world_rank(0) == 0;
  if (*has_failed) return true;
  if (!has_key(kAnyGoneRank).value_or(false)) return false;
  for (int q = 0; q < group.size(); ++q) {
    const int other = group.world_rank(q);
    if (q == group.rank || !has_key(key_of_gone_rank(other)).value_or(false)) continue;
    // A rank whose program ended well has done its part of the call. Other ranks may need long for their parts.
    if (!has_key(key_of_ended_rank(other)).value_or(true)) return true;
  }
  return false;
}

std::string FailureReport::news() {
  const auto news = std::make_shared<std::string>();
  const auto ask = [key = shared_->any_key(), news](KeyValueStore& store) {
    if (store.has(key).value_or(false)) *news = "another rank has failed";
  };
  return ask_in_time(shared_->store, ask) ? *news : "";
}

absl::Status FailureReport::explain(const CallSignature& call, const std::string& why) {
  const Group& group = shared_->group;
  std::string text = group.self() + " " + where(call) + ": " + why;
  const auto answers = std::make_shared<Answers>();
  if (!ask_all(answers)) {
    const std::string text_and_hint = text + "; " + silent_server();
    return make_error(ExitCode::kPeerLost, text_and_hint);
  }
  ExitCode code = ExitCode::kPeerLost;
  std::vector<int> silent, ended;
  std::size_t told = 0;
  for (int q = 0; q < group.size(); ++q) {
    if (q == group.rank) continue;
    const std::string& answer = answers->of[q].text;
    if (answers->of[q].has_ended) {
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
  if (answers->store_is_gone)
    text += "; " + gone_server();
  else if (!silent.empty())
    text += "; rank " + number_ranges(silent) + (silent.size() == 1 ? " does" : " do") + " not answer";
  if (!ended.empty()) {
    text += "; the program of rank " + number_ranges(ended) +
            " has ended. [T0436] hint: every rank takes as many steps, and makes as many other calls, as the others";
  }
  if (code == ExitCode::kInternal)
    text += "; ranks disagree. [T0437] hint: every rank must make the same calls in the same order";
  if (code == ExitCode::kPeerLost && !silent.empty() && !answers->store_is_gone) text += kHintOfSilence;
  return make_error(code, text);
}

}  // namespace tessera
