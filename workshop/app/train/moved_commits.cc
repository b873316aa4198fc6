#include "workshop/app/train/moved_commits.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <numeric>
#include <optional>
#include <system_error>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/commit_log.h"
#include "checkpoint/saved_checkpoint.h"
#include "engine/memory/durable_files.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "workshop/launch/rank_environment.h"

namespace tessera::app {
namespace {

namespace fs = std::filesystem;

constexpr char kRankZero[] = "rank 0";

std::string folder_of_moved(const Strategy& strategy) { return strategy.durable.dir + "/moved-commits"; }

absl::StatusOr<std::int64_t> step_of(const std::string& path) {
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<SavedCheckpoint> checkpoint, SavedCheckpoint::open(path, "durable"));
  return checkpoint->manifest().step;
}

/// The last commit of rank 0.
struct LastCommit {
  std::int64_t step = 0;
  std::vector<int> hosts;  ///< ranks_of_hosts
  bool is_on_all = false;  ///< whether all ranks are known to have a commit of this run (CommitLog::has_begun)
};

/// Returns rank 0's last commit; nothing if it has none. Errors: those of CommitLog.
absl::StatusOr<std::optional<LastCommit>> last_commit(const std::string& folder) {
  if (CommitLog::ranks_in(folder) == 0) return std::nullopt;
  TESSERA_ASSIGN_OR_RETURN(const auto log, CommitLog::open(folder, 0, kRankZero));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<Commit> commits, log->read());
  if (commits.empty()) return std::nullopt;
  return LastCommit{commits.back().step, ranks_of_hosts(commits.back()), log->has_begun()};
}

/// Runs this program once more with the arguments `words`, as a separate job, and returns its exit code. The new
/// process ends when this process ends.
absl::StatusOr<int> run_again(const std::vector<std::string>& words) {
  std::vector<std::string> environment = without_rank(current_environment());
  std::vector<char*> arguments, variables;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  for (std::string& entry : environment) variables.push_back(entry.data());
  arguments.push_back(nullptr);
  variables.push_back(nullptr);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() == parent) ::execve("/proc/self/exe", arguments.data(), variables.data());
    ::_exit(127);
  }
  int status = 0;
  pid_t ended = child;
  while (child > 0 && (ended = ::waitpid(child, &status, 0)) < 0 && errno == EINTR) continue;
  if (ended < 0)
    return make_error(ExitCode::kOsResource, "durable: no process could be started: " +
                                                 std::error_code(errno, std::system_category()).message() +
                                                 ". [T1163] hint: end other processes, or raise the limit of them");
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/// Makes a checkpoint of the commits. `hosts` has the number of ranks of each host that committed.
absl::Status convert(const TrainCommand& command, const Strategy& strategy, const std::vector<int>& hosts, int ranks) {
  const std::string& folder = strategy.durable.dir;
  const int committed = std::accumulate(hosts.begin(), hosts.end(), 0), there = CommitLog::ranks_in(folder);
  if (there != committed)
    return make_error(
        ExitCode::kNoInput,
        "durable.dir " + folder + " holds commits of " + std::to_string(committed) +
            " ranks, and rank 0's host has those of " + std::to_string(there) +
            ", so they do not become a checkpoint for " + std::to_string(ranks) +
            ". [T1164] hint: make it by tessera checkpoint from-commits on the hosts that committed; or copy the files "
            "rank-* of all hosts into the folder of rank 0's host");
  log_info("durable.dir " + folder + ": " + std::to_string(committed) + " ranks committed, and this run has " +
           std::to_string(ranks) + ", so their last commit becomes a checkpoint first");
  std::error_code ignored;
  fs::remove_all(folder_of_moved(strategy), ignored);  // left by a run that was killed
  std::vector<std::string> words = {"tessera", "checkpoint", "from-commits", folder, "--to", folder_of_moved(strategy),
                                    "--",      "tessera"};
  words.insert(words.end(), command.command_line.begin() + 1, command.command_line.end());
  TESSERA_ASSIGN_OR_RETURN(const int code, run_again(words));
  if (code == 0) return absl::OkStatus();
  // Whether the launcher starts the ranks again depends on the exit code, so the command's code is kept.
  const bool is_known = code >= static_cast<int>(ExitCode::kUsage) && code <= static_cast<int>(ExitCode::kConfig);
  return make_error(is_known ? static_cast<ExitCode>(code) : ExitCode::kInternal,
                    "durable.dir " + folder + ": the commits of " + std::to_string(committed) +
                        " ranks did not become a checkpoint, with exit code " + std::to_string(code) +
                        ". [T1165] hint: what is above says why; the commits stay as they are");
}

/// Removes the commits of all ranks, and the files of their offloaded state. Errors: 69 if a run has the folder open,
/// which may be one that has not committed yet.
absl::Status remove_commits(const Strategy& strategy) {
  TESSERA_ASSIGN_OR_RETURN(const auto lock, CommitLog::open(strategy.durable.dir, 0, kRankZero));
  TESSERA_RETURN_IF_ERROR(CommitLog::remove_all(strategy.durable.dir, kRankZero));
  const std::string stem = durable_stem(strategy.durable.dir);
  for (const std::string& path : strategy.offload.paths) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(path, ignored))
      if (entry.path().filename().string().starts_with(stem)) fs::remove(entry.path(), ignored);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> moved_checkpoint(const Strategy& strategy) {
  std::error_code error;
  const std::string folder = folder_of_moved(strategy);
  if (!fs::exists(folder + "/latest", error)) return "";
  return find_checkpoint(folder, "durable.dir");
}

absl::StatusOr<std::optional<std::int64_t>> moved_step(const Strategy& strategy) {
  TESSERA_ASSIGN_OR_RETURN(const std::string path, moved_checkpoint(strategy));
  if (path.empty()) return std::nullopt;
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t step, step_of(path));
  return step;
}

absl::StatusOr<std::string> later_checkpoint(const std::string& path, const std::string& other) {
  if (path.empty() || other.empty()) return path.empty() ? other : path;
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t step, step_of(path));
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t other_step, step_of(other));
  return other_step > step ? other : path;
}

void remove_moved_checkpoint(const Strategy& strategy) {
  std::error_code error;
  const std::string folder = folder_of_moved(strategy);
  // A folder without `latest` is no checkpoint. If this program is killed here, no run therefore goes back to this
  // checkpoint.
  fs::remove(folder + "/latest", error);
  if (!error) fs::remove_all(folder, error);
  if (error) log_warning("durable: " + folder + " is not needed any more and cannot be removed: " + error.message());
}

absl::Status move_commits(const TrainCommand& command, const Strategy& strategy, const Topology& topology) {
  const bool goes_on = strategy.durable.every > 0 && command.checkpoints.resume == "auto";
  if (!goes_on || !command.commits.empty() || command.replays || topology.rank != 0) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(std::string moved, moved_checkpoint(strategy));
  const absl::StatusOr<std::optional<LastCommit>> found = last_commit(strategy.durable.dir);
  // An Engine reports damage. Beside a checkpoint of older commits, commits that cannot be read are not removed.
  if (!found.ok()) return moved.empty() ? absl::OkStatus() : found.status();
  const std::optional<LastCommit>& last = *found;
  if (!moved.empty() && last) {
    TESSERA_ASSIGN_OR_RETURN(const std::int64_t step, step_of(moved));
    if (last->is_on_all && last->step > step) {
      remove_moved_checkpoint(strategy);  // the ranks that continued from it have committed since
      moved.clear();
    }
  }
  if (!moved.empty()) return remove_commits(strategy);
  const std::vector<int> hosts = last ? last->hosts : std::vector<int>();
  const int committed = std::accumulate(hosts.begin(), hosts.end(), 0);
  // If "reproducible" is off, another number of ranks would give other bits. The Engine then reports an error with a
  // hint.
  if (hosts.empty() || committed == topology.world_size || !strategy.reproducible) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(convert(command, strategy, hosts, topology.world_size));
  return remove_commits(strategy);
}

}  // namespace tessera::app
