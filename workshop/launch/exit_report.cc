#include "workshop/launch/exit_report.h"

#include <fmt/format.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kLongestErrorFile = 1 << 20;
constexpr std::size_t kLongestMessage = 4000;
constexpr std::size_t kMostLines = 32;  // lines of ranks in a report

std::string meaning_of(int code) {
  switch (static_cast<ExitCode>(code)) {
    case ExitCode::kUsage:
      return "wrong command line";
    case ExitCode::kCorruptData:
      return "corrupt data";
    case ExitCode::kNoInput:
      return "a file is missing";
    case ExitCode::kUnavailable:
      return "a port, store or device cannot be had";
    case ExitCode::kInternal:
      return "internal error, or an exception in the model";
    case ExitCode::kOsResource:
      return "the system ran out of something";
    case ExitCode::kCannotCreate:
      return "cannot create output";
    case ExitCode::kIo:
      return "input or output failed";
    case ExitCode::kPeerLost:
      return "a peer was lost, has ended or did not answer in time";
    case ExitCode::kPermission:
      return "no permission";
    case ExitCode::kConfig:
      return "wrong configuration";
    default:
      return "";
  }
}

std::string gibibytes(std::int64_t bytes) { return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1 << 30)); }

/// Returns " or for CPU time (ulimit -t is 60 s here)", or "" if there is no such limit. Ranks inherit this limit.
std::string or_for_cpu_time() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_CPU, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  return fmt::format(" or for CPU time (ulimit -t is {} s here)", limit.rlim_cur);
}

std::string explain_signal(const RankExit& exit, int signal) {
  const char* name = ::sigabbrev_np(signal);
  std::string text = fmt::format("signal {} (SIG{})", signal, name ? name : "?");
  if (signal == SIGSEGV || signal == SIGBUS || signal == SIGFPE || signal == SIGILL)
    return text + ": crashed. [T0588] hint: run it under a debugger, or look for a core file";
  if (signal == SIGABRT) return text + ": aborted by itself";
  if (signal == SIGXCPU)
    return text +
           ": its CPU time is used up. [T1072] hint: raise the limit (ulimit -t), or ask the scheduler for more time";
  if (signal != SIGKILL) return text;
  text += fmt::format(": killed from outside, perhaps by the out-of-memory killer{}; its peak was {}",
                      or_for_cpu_time(), gibibytes(exit.peak_resident_bytes));
  if (exit.memory_limit_bytes)
    text += fmt::format(", the memory limit of this group {}", gibibytes(*exit.memory_limit_bytes));
  return text + ". [T0589] hint: `dmesg` names processes killed for memory; offload, or shard over more ranks";
}

std::string name_of(const RankRecord& record) {
  // A parameter server has its own name in the place of a host (Supervisor::add_servers). It is no rank of the job.
  if (record.host.starts_with("parameter server")) return fmt::format("{} (pid {})", record.host, record.pid);
  const std::string place = record.host.empty() ? "" : " on " + record.host;
  return fmt::format("rank {} (pid {}{})", record.rank, record.pid, place);
}

std::string state_of(const RankRecord& record) {
  if (!record.lost.empty()) return record.lost;
  if (record.was_stopped) return "was stopped (SIGSTOP) and ended by the launcher";
  if (record.ended_by_launcher) return "did not end by itself and was ended by the launcher";
  return record.exit.failed() ? explain(record.exit, record.code_of_tessera) : "exit code 0";
}

bool lost_a_peer(const RankRecord& record) { return record.exit.code() == static_cast<int>(ExitCode::kPeerLost); }

/// Returns whether the failure began on another rank, as far as this rank knows.
bool follows_another(const RankRecord& record) {
  return record.lost.empty() && (lost_a_peer(record) || record.told_by_peer);
}

/// Returns the rank that explains why `cause` lost a peer although no rank failed: the first rank that ended with
/// success before `cause`.
const RankRecord* ended_early(const std::vector<RankRecord>& records, const RankRecord& cause) {
  const RankRecord* best = nullptr;
  if (!lost_a_peer(cause) || !cause.lost.empty()) return best;
  for (const RankRecord& record : records) {
    if (record.exit.failed() || record.ended_by_launcher || record.exit.when > cause.exit.when) continue;
    if (!best || record.exit.when < best->exit.when) best = &record;
  }
  return best;
}

double seconds_between(std::chrono::system_clock::time_point from, std::chrono::system_clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

std::chrono::system_clock::time_point RankRecord::failure_time() const {
  return message_time ? std::min(*message_time, exit.when) : exit.when;
}

const RankRecord* first_cause(const std::vector<RankRecord>& records) {
  const RankRecord* best = nullptr;
  for (const RankRecord& record : records) {
    if (!record.failed()) continue;
    const auto before = [&](const RankRecord& other) {
      if (follows_another(record) != follows_another(other)) return follows_another(other);
      return record.failure_time() < other.failure_time();
    };
    if (!best || before(*best)) best = &record;
  }
  return best;
}

std::string explain(const RankExit& exit, std::optional<int> code_of_tessera) {
  if (const auto signal = exit.signal()) return explain_signal(exit, *signal);
  const std::string meaning = code_of_tessera == exit.code() ? meaning_of(exit.code()) : "";
  if (meaning.empty()) return fmt::format("exit code {}", exit.code());
  return fmt::format("exit code {} ({})", exit.code(), meaning);
}

bool fails_again(int code) {
  for (const ExitCode lasting : {ExitCode::kUsage, ExitCode::kNoInput, ExitCode::kPermission, ExitCode::kConfig})
    if (code == static_cast<int>(lasting)) return true;
  return false;
}

std::string failure_report(const std::vector<RankRecord>& records, const RankRecord& cause) {
  constexpr const char* kRule = "------------------------------------------------------------------------\n";
  std::string text = kRule;
  std::size_t lines = 0;
  for (const RankRecord& record : records) {
    if (records.size() > kMostLines && !record.exit.failed()) continue;
    if (++lines <= kMostLines) text += fmt::format("{}: {}\n", name_of(record), state_of(record));
  }
  if (lines > kMostLines) text += fmt::format("and {} more that did not end well\n", lines - kMostLines);
  text += fmt::format("{}first cause: {}: {}\n", kRule, name_of(cause), state_of(cause));
  if (const RankRecord* early = ended_early(records, cause))
    text += fmt::format(
        "  rank {} had ended early, and with success (exit code 0), {:.1f} s before. [T0590] hint: ranks must make the "
        "same number of steps and calls; a loader with fewer batches, or a return on one rank alone, is the usual "
        "reason\n",
        early->rank, seconds_between(early->exit.when, cause.exit.when));
  if (!cause.message.empty()) text += fmt::format("  it reported: {}\n", cause.message);
  if (!cause.last_errors.empty()) text += "  its last lines on stderr:\n";
  for (const std::string& line : cause.last_errors) text += fmt::format("    {}\n", line);
  return text + kRule;
}

void read_error_file(const std::string& path, RankRecord& record) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return;
  std::string text(kLongestErrorFile, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("message")) return;
  const nlohmann::json& words = json.at("message");
  const nlohmann::json& message = words.is_object() && words.contains("message") ? words.at("message") : words;
  if (!message.is_string()) return;
  record.message = message.get<std::string>().substr(0, kLongestMessage);
  const nlohmann::json told =
      json.value(nlohmann::json::json_pointer("/message/extraInfo/told_by_peer"), nlohmann::json());
  record.told_by_peer = told.is_boolean() && told.get<bool>();
  const nlohmann::json code =
      json.value(nlohmann::json::json_pointer("/message/extraInfo/code_of_tessera"), nlohmann::json());
  if (code.is_number_integer()) record.code_of_tessera = code.get<int>();
  const auto since_epoch = std::chrono::seconds(info.st_mtim.tv_sec) + std::chrono::nanoseconds(info.st_mtim.tv_nsec);
  record.message_time = std::chrono::system_clock::time_point(
      std::chrono::duration_cast<std::chrono::system_clock::duration>(since_epoch));
}

std::optional<std::int64_t> memory_limit_bytes() {
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    const bool version2 = controllers.empty(), version1 = controllers == "memory";
    if (!version2 && !version1) continue;
    const std::string folder = (version2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory") + path;
    std::ifstream file(folder + (version2 ? "/memory.max" : "/memory.limit_in_bytes"));
    std::int64_t limit = 0;
    // The text "max", or the largest number of version 1, means that there is no limit.
    if (file >> limit && limit > 0 && limit < std::int64_t{1} << 60) return limit;
  }
  return std::nullopt;
}

}  // namespace tessera
