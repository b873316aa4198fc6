#include "engine/moved_commits.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <system_error>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/commit_log.h"
#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/generators.h"
#include "engine/job/job.h"
#include "engine/job/outcomes.h"
#include "engine/memory/durable_files.h"
#include "offload/files/file_calls.h"
#include "runtime/base/log.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "runtime/comm/shared/run_ranks.h"
#include "runtime/config/transport_rows.h"
#include "tessera/checkpoint.h"
#include "tessera/deferred_init.h"
#include "tessera/durable.h"
#include "tessera/engine.h"

namespace tessera {
namespace {

// This file works as follows. All ranks call `move_commits`, and rank 0 does its work in `move_on_rank_zero`. That
// function first looks at what there is: a checkpoint that an earlier run made of commits (`moved_checkpoint`), and
// commits (`last_commit`). If another number of ranks made the commits, `convert_commits` makes a checkpoint of them:
// `save_last_commit` runs the old ranks as threads, with a ModuleOutline and strategy_of_commits. At last
// `remove_commits` removes what the checkpoint replaces. Each of these steps leaves a state from which a later run can
// complete the work.

constexpr char kRankZero[] = "rank 0";
constexpr char kMovedFolder[] = "moved-commits";

std::string folder_of_moved(const std::string& dir) { return dir + "/" + kMovedFolder; }

absl::Status remove_moved(const std::string& dir) {
  return remove_checkpoints(FilePlace(dir, 0) / kMovedFolder, kRankZero);
}

/// Returns the path of the checkpoint that was made of commits; empty if there is none.
absl::StatusOr<std::string> moved_checkpoint(const std::string& dir) {
  std::error_code error;
  const std::string folder = folder_of_moved(dir);
  if (!std::filesystem::exists(folder + "/latest", error)) return "";
  return find_checkpoint(folder, "durable.dir");
}

absl::StatusOr<std::int64_t> step_of_moved(const std::string& path) {
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
absl::StatusOr<std::optional<LastCommit>> last_commit(const std::string& dir) {
  if (CommitLog::ranks_in(dir) == 0) return std::nullopt;
  TESSERA_ASSIGN_OR_RETURN(const auto log, CommitLog::open(dir, 0, kRankZero));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<Commit> commits, log->read());
  if (commits.empty()) return std::nullopt;
  return LastCommit{commits.back().step, ranks_of_hosts(commits.back()), log->has_begun()};
}

/// Makes modules that have the classes, names, sizes and types of a module, and no values and no forward. A tensor or a
/// module with two names keeps both.
class ModuleOutline {
 public:
  std::shared_ptr<torch::nn::Module> of(const torch::nn::Module& module) {
    std::shared_ptr<torch::nn::Module>& outline = modules_[&module];
    if (outline) return outline;
    outline = std::make_shared<torch::nn::Module>(module.name());
    outline->eval();  // there is no forward that could move running statistics
    for (const auto& item : module.named_parameters(/*recurse=*/false))
      outline->register_parameter(item.key(), like(item.value()), item.value().requires_grad());
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      const at::Tensor& buffer = item.value();
      outline->register_buffer(item.key(), at::empty(buffer.sizes(), at::TensorOptions(buffer.scalar_type())));
    }
    for (const auto& item : module.named_children()) outline->register_module(item.key(), of(*item.value()));
    return outline;
  }

 private:
  /// Returns a tensor without memory. An Engine makes the part of it that its rank holds.
  at::Tensor like(const at::Tensor& parameter) {
    at::Tensor& outline = tensors_[parameter.unsafeGetTensorImpl()];
    if (outline.defined()) return outline;
    const DeferredInitScope deferred;
    const at::TensorOptions options(parameter.scalar_type());
    outline = parameter.is_contiguous() ? at::empty(parameter.sizes(), options)
                                        : at::empty_strided(parameter.sizes(), parameter.strides(), options);
    return outline;
  }

  std::map<const torch::nn::Module*, std::shared_ptr<torch::nn::Module>> modules_;
  std::map<const c10::TensorImpl*, at::Tensor> tensors_;
};

/// Returns the strategy with which `ranks` ranks, as threads, continue from their commits. The keys that change here
/// change no state that a commit holds. They say how gradients are summed, or what a run writes, and these ranks do
/// neither.
Strategy strategy_of_commits(Strategy strategy, int ranks) {
  const std::int64_t replicas = strategy.mesh.replicas(), shards = strategy.mesh.shards();
  const bool fits = ranks % std::max<std::int64_t>(replicas, 1) == 0 &&
                    ranks % std::max<std::int64_t>(shards, 1) == 0 &&
                    (replicas == 0 || shards == 0 || replicas * shards == ranks);
  if (!fits) strategy.mesh = {};
  const TransportChoice transport = strategy.comm.transport;
  const bool shares = transport == TransportChoice::kAuto || has(transport, transport_traits::kSharedMemory);
  strategy.host_sharing = strategy.host_sharing && shares;
  strategy.comm.transport = TransportChoice::kAuto;
  // "reproducible" refuses some hosts and meshes unless ranks send the sums of several subtrees, as they do for three
  // microbatches. With each_microbatch the run that committed had none of these. "noise_scale" needs two microbatches.
  if (strategy.gradient_sync == GradientSync::kLastMicrobatch) {
    strategy.gradient_accumulation = 3;
    strategy.compression.gradients = strategy.compression.sums = WireForm::kPlain;
  } else {
    strategy.gradient_accumulation = ranks == 1 ? 2 : 1;
  }
  strategy.deal = {};
  strategy.record_hashes = {};
  strategy.broadcast_buffers = BufferBroadcast::kNone;
  strategy.checkpoint.async = false;
  strategy.memory.tensor_heap = false;
  return strategy;
}

int sum_of(const std::vector<int>& hosts) { return std::accumulate(hosts.begin(), hosts.end(), 0); }

/// Checks that this process can make the ranks that committed.
absl::Status expect_all_here(const Job& job, int committed) {
  const std::string& dir = job.strategy.durable.dir;
  const int ranks = job.mesh.world_size(), there = CommitLog::ranks_in(dir);
  if (there != committed)
    return make_error(
        ExitCode::kNoInput,
        c10::str("durable.dir ", dir, " holds commits of ", counted(committed, "rank"),
                 ", and rank 0's host has those of ", there, ", so they do not become a checkpoint for ", ranks,
                 ". [T1164] hint: make it by tessera checkpoint from-commits on the hosts that committed; or copy the "
                 "files rank-* of all hosts into the folder of rank 0's host"));
  if (job.axes.world->gpu() != Collectives::kHostMemory)
    return make_error(
        ExitCode::kConfig,
        c10::str("durable.dir ", dir, " holds commits of ", counted(committed, "rank"), ", and this run has ", ranks,
                 ". Ranks with a GPU are processes, so rank 0 cannot make those that committed. [T1166] hint: make a "
                 "checkpoint of the commits, by tessera checkpoint from-commits, or by a program that calls "
                 "resume_durable and save_checkpoint on as many ranks as committed"));
  return absl::OkStatus();
}

/// Makes the ranks of the hosts once more, as threads. They save their last commit as a checkpoint. Returns what they
/// could not keep. If no commit is on all ranks, nothing is saved.
std::vector<std::string> save_last_commit(const Job& job, const std::vector<int>& hosts) {
  const int committed = sum_of(hosts), threads = at::get_num_threads();
  const Strategy strategy = strategy_of_commits(job.strategy, committed);
  Mutex mutex;  // LibTorch's modules write down their names when they are first asked for them
  std::vector<std::string> inexact;
  run_ranks({.ranks = committed, .ranks_of_hosts = hosts, .timeout_s = strategy.comm.timeout_s}, [&](const Mesh& mesh) {
    set_log_rank(mesh.rank(), committed);
    at::set_num_threads(threads);
    const auto outline = [&] {
      const MutexLock lock(mutex);
      return ModuleOutline().of(*job.module);
    };
    Engine engine(outline(), strategy, mesh, job.own_rules);
    const std::optional<LoadedCheckpoint> resumed = resume_durable(engine);
    if (!resumed) return;
    save_checkpoint(engine, folder_of_moved(strategy.durable.dir), resumed->items);
    if (mesh.rank() == 0) inexact = resumed->inexact;
  });
  return inexact;
}

/// Makes a checkpoint of the commits. Returns what the old ranks could not keep.
absl::StatusOr<std::vector<std::string>> convert_commits(const Job& job, const std::vector<int>& hosts) {
  const std::string& dir = job.strategy.durable.dir;
  const int committed = sum_of(hosts), ranks = job.mesh.world_size();
  TESSERA_RETURN_IF_ERROR(expect_all_here(job, committed));
  log_info(c10::str("durable.dir ", dir, ": ", counted(committed, "rank"), " committed, and this run has ", ranks,
                    ", so their last commit becomes a checkpoint first"));
  TESSERA_RETURN_IF_ERROR(remove_moved(dir));  // left by a run that was killed
  std::vector<std::string> inexact;
  const at::Tensor generator = state_of_generator(c10::Device(c10::kCPU));
  const absl::Status saved = status_from([&] {
    inexact = save_last_commit(job, hosts);
    return absl::OkStatus();
  });
  set_generator(c10::Device(c10::kCPU), generator);  // the ranks of this process have one generator
  if (saved.ok()) return inexact;
  return make_error(exit_code_of(saved),
                    c10::str("durable.dir ", dir, ": the commits of ", counted(committed, "rank"),
                             " stay as they are, and do not become a checkpoint for ", ranks, ": ", message_of(saved)));
}

/// Removes the files of offloaded state that commits hold from a directory of offload.paths; a failure is only logged.
void remove_records(const std::string& directory, const std::string& stem) {
  std::vector<std::string> names;
  if (file_calls::list_folder(FilePlace(directory, 0), names) < 0) return;  // there is no such folder
  for (const std::string& name : names) {
    if (!name.starts_with(stem)) continue;
    const FilePlace file = FilePlace(directory, 0) / name;
    if (const int got = file_calls::unlink(file); got < 0 && got != -ENOENT)
      log_warning("durable: " + file.path() + " is not needed any more and cannot be removed: " +
                  std::error_code(-got, std::system_category()).message());
  }
}

/// Removes the commits of all ranks, and the files of their offloaded state. Errors: 69 if a run has the folder open,
/// which may be one that has not committed yet.
absl::Status remove_commits(const Strategy& strategy) {
  const std::string& dir = strategy.durable.dir;
  TESSERA_ASSIGN_OR_RETURN(const auto lock, CommitLog::open(dir, 0, kRankZero));
  TESSERA_RETURN_IF_ERROR(CommitLog::remove_all(dir, kRankZero));
  for (const std::string& path : strategy.offload.paths) remove_records(path, durable_stem(dir));
  return absl::OkStatus();
}

/// Removes the checkpoint at `moved`, and clears `moved`, if the ranks that continued from it have committed since.
absl::Status forget_older(std::string& moved, const std::optional<LastCommit>& last, const std::string& dir) {
  if (moved.empty() || !last || !last->is_on_all) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t step, step_of_moved(moved));
  if (last->step <= step) return absl::OkStatus();
  remove_moved_checkpoint(dir);
  moved.clear();
  return absl::OkStatus();
}

/// Does the work of move_commits, on rank 0. Returns the result as JSON; empty if there is none.
absl::StatusOr<std::string> move_on_rank_zero(const Job& job) {
  const Strategy& strategy = job.strategy;
  const std::string& dir = strategy.durable.dir;
  TESSERA_ASSIGN_OR_RETURN(std::string moved, moved_checkpoint(dir));
  // If "reproducible" is off, another number of ranks would give other bits. DurableFiles then reports an error with a
  // hint.
  if (moved.empty() && !strategy.reproducible) return "";
  const absl::StatusOr<std::optional<LastCommit>> last = last_commit(dir);
  // DurableFiles reports damage. Beside a checkpoint of older commits, commits that cannot be read are not removed.
  if (!last.ok() && moved.empty() && exit_code_of(last.status()) == ExitCode::kCorruptData) return "";
  TESSERA_RETURN_IF_ERROR(last.status());
  TESSERA_RETURN_IF_ERROR(forget_older(moved, *last, dir));
  std::vector<std::string> inexact;
  if (moved.empty()) {
    const std::vector<int> hosts = *last ? (*last)->hosts : std::vector<int>();
    if (hosts.empty() || sum_of(hosts) == job.mesh.world_size() || !strategy.reproducible) return "";
    TESSERA_ASSIGN_OR_RETURN(inexact, convert_commits(job, hosts));
    TESSERA_ASSIGN_OR_RETURN(moved, moved_checkpoint(dir));
  }
  TESSERA_RETURN_IF_ERROR(remove_commits(strategy));
  if (moved.empty()) return "";  // the old run ended before all its ranks had a commit, so this run begins anew
  TESSERA_ASSIGN_OR_RETURN(const std::int64_t step, step_of_moved(moved));
  return nlohmann::json{{"path", moved}, {"step", step}, {"inexact", inexact}}.dump();
}

}  // namespace

std::optional<MovedCommits> move_commits(const Job& job) {
  const auto move = [&]() -> absl::StatusOr<std::string> {
    if (job.mesh.rank() != 0) return "";
    return move_on_rank_zero(job);
  };
  const std::vector<std::string> texts = value_or_throw(share_outcomes(*job.axes.control, "commits moved", move));
  if (texts[0].empty()) return std::nullopt;
  const auto text = nlohmann::json::parse(texts[0]);
  return MovedCommits{text.at("path").get<std::string>(), text.at("step").get<std::int64_t>(),
                      text.at("inexact").get<std::vector<std::string>>()};
}

void remove_moved_checkpoint(const std::string& dir) {
  if (const absl::Status removed = remove_moved(dir); !removed.ok())
    log_warning("durable: " + folder_of_moved(dir) + " is not needed any more: " + message_of(removed));
}

}  // namespace tessera
