#include "runtime/comm/meet_in_store.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/process_handle.h"

namespace tessera {
namespace {

constexpr const char* kGivenUp = "given_up";
constexpr std::chrono::microseconds kFirstPause{200}, kLongestPause{10'000};
constexpr std::chrono::milliseconds kBetweenQuestions{100};  // pause between questions whether a rank has given up

/// Returns the key of the list of the processes that are on this host and in this container, where their numbers
/// (pid_t) are valid. The key is "" if the system does not name the host or the container. The value of the key is the
/// number of processes; process i has the key that entry_of returns.
std::string key_of_processes() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::error_code error;
  const std::string space = std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
  return file >> boot && !error ? "processes/" + boot + space : "";
}

std::string entry_of(const std::string& list, std::int64_t i) { return list + "/" + std::to_string(i); }

using Process = std::pair<int, ProcessHandle>;  // a rank, and its process

/// Returns the processes of those of `ranks` that are on this host. It does not ask the store about ranks of other
/// hosts, since a job may have thousands of ranks.
std::vector<Process> processes_of(KeyValueStore& store, std::span<const int> ranks) {
  const std::string list = key_of_processes();
  std::vector<Process> processes;
  if (ranks.empty() || list.empty()) return processes;
  const std::int64_t count = store.add(list, 0).value_or(0);
  for (std::int64_t i = 1; i <= count; ++i) {
    const auto text = store.get(entry_of(list, i), std::chrono::milliseconds(0));
    if (!text.ok()) continue;
    char* pid = nullptr;
    const int rank = static_cast<int>(std::strtol(text->c_str(), &pid, 10));
    if (std::ranges::find(ranks, rank) != ranks.end())
      processes.emplace_back(rank, ProcessHandle(static_cast<pid_t>(std::atol(pid))));
  }
  return processes;
}

}  // namespace

absl::Status publish_process(KeyValueStore& store, int rank) {
  const std::string list = key_of_processes();
  if (list.empty()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t number, store.add(list, 1));
  return store.set(entry_of(list, number), std::to_string(rank) + " " + std::to_string(getpid()));
}

void publish_given_up(KeyValueStore& store, const std::string& self, const absl::Status& reason) {
  if (store.has(kGivenUp).value_or(true)) return;
  store.set(kGivenUp, self + " gave up: " + message_of(reason)).IgnoreError();
}

absl::StatusOr<std::string> get_from_others(KeyValueStore& store, const std::string& key,
                                            std::chrono::milliseconds timeout, std::span<const int> ranks) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + timeout;
  Clock::time_point next_question = Clock::now() + kBetweenQuestions;
  std::optional<std::vector<Process>> processes;
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    TESSERA_ASSIGN_OR_RETURN(const bool is_set, store.has(key));
    if (is_set) return store.get(key, std::chrono::milliseconds(0));
    const Clock::time_point now = Clock::now();
    if (now >= end) return absl::DeadlineExceededError("no rank set '" + key + "' in time");
    if (now >= next_question) {
      next_question = now + kBetweenQuestions;
      if (!processes) processes = processes_of(store, ranks);
      // A rank that gives up writes this to the store before it ends.
      const auto ended = std::ranges::find_if(*processes, [](const Process& each) { return !each.second.alive(); });
      TESSERA_ASSIGN_OR_RETURN(const bool has_given_up, store.has(kGivenUp));
      // A rank may have set `key` before it gave up or ended.
      if ((has_given_up || ended != processes->end()) && !store.has(key).value_or(false)) {
        if (!has_given_up)
          return make_error(
              ExitCode::kPeerLost,
              "the process of rank " + std::to_string(ended->first) +
                  " has ended. [T1082] hint: this rank waited for it; what that rank printed last, or its "
                  "launcher, says why");
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
  const absl::Status met = get_from_others(store, all, limit, group.world_ranks).status();
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
