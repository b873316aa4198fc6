#include "engine/training/replica_sync.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>

#include "engine/asynchronous/hogwild_values.h"
#include "engine/asynchronous/owned_shards.h"
#include "engine/step/outer_place.h"
#include "runtime/comm/local/local_collectives.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Returns the axes of a rank that communicates with no other rank, and uses no memory that other ranks can reach. It
/// is collective.
MeshAxes alone(const Mesh& mesh, bool on_gpu) {
  MeshAxes axes;
  axes.control = std::make_shared<LocalCollectives>(0, 1, /*one_host=*/false);
  const auto nobody = on_gpu ? value_or_throw(groups_of(mesh).alone()) : axes.control;
  axes.gather = axes.reduce = axes.replicate = axes.world = nobody;
  return axes;
}

/// Throws if the launcher gives the job parameter servers that the strategy does not use.
void expect_no_idle_servers(const SyncConfig& sync) {
  const char* const servers = std::getenv("TESSERA_SERVERS");
  if (sync.has_servers() || !servers || !*servers || !std::getenv("TESSERA_LAUNCHER")) return;
  throw Error(
      ExitCode::kConfig,
      "/sync/owners: the launcher gives the job parameter servers (--servers or --join), and the strategy has no "
      "shards for them. [T1081] hint: set \"sync\": {\"type\": \"asynchronous\", \"owners\": \"servers\"}, or leave "
      "the option out; a program unsets TESSERA_SERVERS before it makes an Engine that has no part in them");
}

}  // namespace

MeshAxes ReplicaSync::axes(const Mesh& mesh, const MeshAxes& whole, bool on_gpu) {
  expect_no_idle_servers(later_);
  if (!is_apart()) return whole;
  if (!now_.has_common_parameters()) return value_or_throw(groups_of(mesh).within_replica(whole));
  auto group = value_or_throw(groups_of(mesh).common_memory("asynchronous"));
  if (now_.has_servers()) {
    const auto ranks = static_cast<int>(now_.asynchronous.replica_ranks);
    // If the world size is not a multiple of `ranks`, the plan throws later.
    if (ranks > 1 && group->size() % ranks == 0)
      replica_ = value_or_throw(groups_of(mesh).neighbours("replica", ranks));
    board_ = std::make_unique<PeerBoard>(std::move(group), strategy_.comm.timeout_s, PeerBoard::Sees::kNothing);
    return alone(mesh, on_gpu);
  }
  if (!group->shares_memory()) {
    throw Error(
        ExitCode::kConfig,
        "/sync/type: ranks that do not wait for each other, or with backups for some alone, have parameters in memory "
        "that they share, and the transport " +
            group->transport() +
            " has none. [T0826] hint: run all ranks on one host, with comm.transport \"auto\" or \"host\"; with "
            "sync.type asynchronous and sync.owners \"servers\" they may be on several");
  }
  board_ = std::make_unique<PeerBoard>(std::move(group), strategy_.comm.timeout_s);
  MeshAxes axes = alone(mesh, on_gpu);
  if (now_.is_hogwild()) axes.gather = value_or_throw(groups_of(mesh).world("hogwild"));  // group with the parameters
  if (now_.type == SyncType::kBackups) readers_ = value_or_throw(groups_of(mesh).common_memory("backups"));
  if (!on_gpu) axes.readers = readers_;
  return axes;
}

void ReplicaSync::begin(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                        const MeshAxes& replica, const MeshAxes& whole, const Accelerator& accelerator,
                        MemoryUse& use) {
  if (board_) {
    copies_ = std::make_unique<HostCopies>(units, plan, accelerator, board_->rank(), readers_.get());
    if (now_.is_hogwild()) {
      push_to(std::make_unique<HogwildValues>(units, plan, *board_));
    } else if (now_.type == SyncType::kBackups) {
      auto first = std::make_unique<FirstGradients>(units, plan, *board_, *copies_);
      first_ = first.get();
      common_ = std::move(first);
    } else if (now_.has_servers()) {
      auto served = std::make_unique<ServedShards>(units, plan, *board_, *copies_, strategy_, replica_);
      served_ = served.get();
      push_to(std::move(served));
    } else {
      push_to(std::make_unique<OwnedShards>(units, plan, *board_, *copies_));
    }
    const bool is_queued = accelerator.device.is_queued;
    use[is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kOptimizer] +=
        common_->memory_bytes() + copies_->memory_bytes();
    use[is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kStaging] += common_->scratch_bytes();
  } else if (is_apart()) {
    outer_ = std::make_unique<OuterSteps>(units, plan, replica, whole, outer_place_of(accelerator),
                                          accelerator.device.waits);
    use[MemoryCategory::kOptimizer] += outer_->memory_bytes();
    use[MemoryCategory::kStaging] += outer_->scratch_bytes();
  }
}

void ReplicaSync::push_to(std::unique_ptr<PushedParameters> parameters) {
  pushed_ = parameters.get();
  common_ = std::move(parameters);
}

std::unique_ptr<Step> ReplicaSync::make_step(const StepContext& context, GradientNorm& norm) const {
  if (first_) return std::make_unique<BackedUpStep>(context, norm, *first_);
  return pushed_ ? std::make_unique<AsynchronousStep>(context, norm, *pushed_) : nullptr;
}

bool ReplicaSync::pulls(const std::vector<std::unique_ptr<Unit>>& units, std::function<void(Unit&)> on_pulled,
                        UnitKeeper::OnFailure on_failure) {
  PulledParameters* const shards = pulled();
  if (!shards) return false;
  pulls_ = std::make_unique<Pulls>(pointers_to(units), *shards, std::move(on_pulled), std::move(on_failure));
  return true;
}

/// Gives every rank the largest count of steps, and the largest count of samples, that any rank has. After that, the
/// state of one rank is the state of all.
void ReplicaSync::agree_on_steps(Step& step) {
  StepProgress progress = step.progress();
  const std::array<std::int64_t, 2> own = {progress.applied, progress.samples};
  std::vector<std::array<std::int64_t, 2>> all(static_cast<std::size_t>(board_->size()));
  throw_if_error(board_->group().all_gather("steps of ranks", own.data(), all.data(), sizeof own).wait());
  for (const auto& [applied, samples] : all) {
    progress.applied = std::max(progress.applied, applied);
    progress.samples = std::max(progress.samples, samples);
  }
  step.resume(progress);
}

}  // namespace tessera
