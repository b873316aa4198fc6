#include "runtime/comm/meet_in_store.h"

#include <algorithm>
#include <cstdint>
#include <thread>

#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr const char* kGivenUp = "given_up";
constexpr std::chrono::microseconds kFirstPause{200}, kLongestPause{10'000};
constexpr std::chrono::milliseconds kBetweenQuestions{100};  // pause between questions whether a rank has given up

}  // namespace

void publish_given_up(KeyValueStore& store, const std::string& self, const absl::Status& reason) {
  if (store.has(kGivenUp).value_or(true)) return;
  store.set(kGivenUp, self + " gave up: " + message_of(reason)).IgnoreError();
}

absl::StatusOr<std::string> get_from_others(KeyValueStore& store, const std::string& key,
                                            std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + timeout;
  Clock::time_point next_question = Clock::now() + kBetweenQuestions;
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    TESSERA_ASSIGN_OR_RETURN(const bool is_set, store.has(key));
    if (is_set) return store.get(key, std::chrono::milliseconds(0));
    const Clock::time_point now = Clock::now();
    if (now >= end) return absl::DeadlineExceededError("no rank set '" + key + "' in time");
    if (now >= next_question) {
      next_question = now + kBetweenQuestions;
      TESSERA_ASSIGN_OR_RETURN(const bool has_given_up, store.has(kGivenUp));
      // A rank may have set `key`, and given up behind that.
      if (has_given_up && !store.has(key).value_or(false)) {
        TESSERA_ASSIGN_OR_RETURN(const std::string who, store.get(kGivenUp, std::chrono::milliseconds(0)));
        return make_error(ExitCode::kPeerLost,
                          who + ". [T1068] hint: this rank waited for others; what that rank printed last says more");
      }
    }
    std::this_thread::sleep_for(pause);
  }
}

absl::Status meet_in_store(const Group& group, const std::string& way, KeyValueStore& store) {
  const std::string key = way + "/" + group.key(), all = key + "/all";
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t come, store.add(key + "/here", 1));
  if (come == group.size()) TESSERA_RETURN_IF_ERROR(store.set(all, "1"));
  const std::chrono::milliseconds limit(static_cast<std::int64_t>(1000 * group.init_timeout_s));
  const absl::Status met = get_from_others(store, all, limit).status();
  if (met.ok() || absl::IsDeadlineExceeded(met)) return met;
  return make_error(exit_code_of(met), group.self() + ": group " + group.key() + ": " + message_of(met));
}

absl::Status meet_in_store_or_fail(const Group& group, const std::string& way, KeyValueStore& store) {
  const absl::Status met = meet_in_store(group, way, store);
  if (!absl::IsDeadlineExceeded(met)) return met;
  return make_error(ExitCode::kPeerLost,
                    group.self() + ": group " + group.key() + ": " + kNotAllHaveCome +
                        ". [T1069] hint: all ranks must make the same groups, so the same Engines, in the "
                        "same order");
}

}  // namespace tessera
