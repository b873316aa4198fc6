#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/commit_log.h"
#include "engine/job/processor.h"
#include "engine/memory/durable_files.h"
#include "runtime/base/status.h"
#include "runtime/comm/resolve_topology.h"
#include "runtime/config/strategy_file.h"
#include "workshop/app/commands.h"
#include "workshop/app/exit_code_after.h"
#include "workshop/app/train/replay.h"

// `tessera checkpoint from-commits` starts again the run that made the commits, on as many ranks as it had. These ranks
// go on from their last commit, save it as a checkpoint, and end (TrainCommand::commits). A commit has the form in
// which its run keeps memory, so no other program can read it. A run can go on from a checkpoint with any number of
// ranks.

namespace tessera::app {
namespace {

constexpr char kFromCommits[] = "checkpoint from-commits";

absl::Status refused(ExitCode code, const std::string& what) {
  return make_error(code, std::string(kFromCommits) + ": " + what);
}

/// The run that committed.
struct CommittedRun {
  int ranks = 0;
  std::vector<int> hosts = {};  ///< ranks of each host; empty: unknown
  std::int64_t threads = 0;     ///< threads of a rank; 0: unknown
};

/// Counts the ranks that have commits in the folder, and reads rank 0's commits.
absl::StatusOr<CommittedRun> committed_run(const std::string& folder) {
  CommittedRun run{.ranks = CommitLog::ranks_in(folder)};
  const auto none = [&] {
    return refused(ExitCode::kNoInput,
                   folder +
                       " holds no commits. [T1087] hint: name the \"dir\" of the strategy's \"durable\", "
                       "with the files of all ranks");
  };
  if (run.ranks == 0) return none();
  TESSERA_ASSIGN_OR_RETURN(const auto log, CommitLog::open(folder, 0, kFromCommits));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<Commit> commits, log->read());
  if (commits.empty()) return none();
  if (const auto processor = processor_in(commits.back().parts)) run.threads = processor->threads;
  run.hosts = ranks_of_hosts(commits.back());
  return run;
}

absl::Status check_strategy_of(const FromCommitsCommand& command) {
  TESSERA_ASSIGN_OR_RETURN(const Strategy strategy, read_strategy(command.run.strategy));
  if (strategy.durable.every > 0) return absl::OkStatus();
  return refused(ExitCode::kConfig,
                 command.run.strategy +
                     " has no \"durable\", so its run made no commits. [T1088] hint: name the strategy with "
                     "which the run committed");
}

TrainCommand as_converted(const FromCommitsCommand& command) {
  TrainCommand run = without_outputs(command.run);
  run.commits = command.commits;
  run.checkpoints.folder = command.to;
  run.checkpoints.keep = 0;
  return run;
}

absl::StatusOr<int> convert(const FromCommitsCommand& command) {
  TESSERA_RETURN_IF_ERROR(check_strategy_of(command));
  const absl::StatusOr<Topology> topology = resolve_topology();  // run_train reports errors of the topology
  if (!topology.ok() || topology->launcher != "single") return run_train(as_converted(command));
  TESSERA_ASSIGN_OR_RETURN(const CommittedRun run, committed_run(command.commits));
  // The checkpoint names the processor of the run that committed, and these ranks must have the same processor.
  keep_threads(run.threads);
  const int committed = std::accumulate(run.hosts.begin(), run.hosts.end(), 0);
  if (!run.hosts.empty() && committed != run.ranks)
    return refused(ExitCode::kNoInput, command.commits + " has files of " + std::to_string(run.ranks) + " ranks, and " +
                                           std::to_string(committed) +
                                           " committed. [T1162] hint: copy the files rank-* of all hosts into this "
                                           "folder; or start this command on these hosts, as the run was started");
  if (command.hosts > 0 && run.ranks % command.hosts != 0)
    return refused(ExitCode::kUsage, "--hosts " + std::to_string(command.hosts) + " does not divide the " +
                                         std::to_string(run.ranks) +
                                         " ranks that committed. [T1089] hint: give the number of hosts of their run, "
                                         "or leave it out");
  LaunchOptions launching;
  launching.ranks = run.ranks;
  // Ranks of several hosts keep memory in another form than ranks that share a host.
  if (command.hosts > 1) {
    launching.pretended_hosts.assign(static_cast<std::size_t>(command.hosts), run.ranks / command.hosts);
  } else if (command.hosts == 0 && run.hosts.size() > 1) {
    launching.pretended_hosts = run.hosts;
  }
  return launch_again(std::move(launching), command.words);
}

}  // namespace

int run_from_commits(const FromCommitsCommand& command) {
  const absl::StatusOr<int> code = convert(command);
  return code.ok() ? *code : exit_code_after(code.status());
}

}  // namespace tessera::app
