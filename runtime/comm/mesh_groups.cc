#include "runtime/comm/mesh_groups.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>

#include "runtime/base/rank_name.h"
#include "runtime/base/status.h"
#include "runtime/comm/flight_recorder.h"
#include "runtime/comm/in_time.h"
#include "runtime/comm/meet_in_store.h"

namespace tessera {

// This file makes the groups of a mesh, and ends them together.
//
// `axes`, `within_replica`, `secondary`, `on_host`, `world` and `neighbours` choose the ranks of a group, and
// `make_group` makes it under a name that no other group has. Names count how often a mesh of this shape was asked for,
// so all ranks must ask in the same order. `abort` ends all groups. It also writes the reason to the store, for ranks
// that have no group with this rank. `leave`, and the end of the process (`living`), tell other ranks that this rank
// has ended well.

namespace {

/// A factory that records the calls of its groups.
class RecordedGroups final : public GroupFactory {
 public:
  RecordedGroups(std::shared_ptr<GroupFactory> factory, std::shared_ptr<FlightRecorder> recorder)
      : factory_(std::move(factory)), recorder_(std::move(recorder)) {}

  absl::StatusOr<std::shared_ptr<Collectives>> make(const std::string& name, const std::vector<int>& world_ranks,
                                                    GroupUse use) override {
    TESSERA_ASSIGN_OR_RETURN(auto group, factory_->make(name, world_ranks, use));
    return recorder_->record(name, std::move(group));
  }
  std::shared_ptr<Collectives> control_of(const std::shared_ptr<Collectives>& group) override {
    return factory_->control_of(group);  // a group of host memory is its own control group, recorded or not
  }

 private:
  const std::shared_ptr<GroupFactory> factory_;
  const std::shared_ptr<FlightRecorder> recorder_;
};

/// Returns whether one of the groups has failed because a peer gave up.
bool is_told(const std::vector<std::shared_ptr<Collectives>>& groups) {
  return std::ranges::any_of(groups, [](const auto& group) { return is_told_by_peer(group->status()); });
}

}  // namespace

Mesh::Mesh(std::shared_ptr<MeshGroups> groups) : groups_(std::move(groups)) {}

const Topology& Mesh::topology() const { return groups_->topology(); }

absl::Status MeshAxes::status() const {
  for (const auto* group : {&gather, &reduce, &replicate, &world}) TESSERA_RETURN_IF_ERROR((*group)->status());
  return secondary ? secondary->status() : absl::OkStatus();
}

MeshGroups::MeshGroups(Topology topology, std::shared_ptr<GroupFactory> factory, std::shared_ptr<KeyValueStore> store)
    : topology_(std::move(topology)),
      factory_(std::move(factory)),
      store_(std::move(store)),
      watch_(topology_.rank, topology_.world_size, store_, [this](const absl::Status& reason) { abort(reason); }) {
  Living& known = living();
  const MutexLock lock(known.mutex);
  known.meshes.insert(this);
}

/// A program that destroys its mesh without a failure ends well, whether it has called `leave` or not. A program that
/// ends with exit code 0 and never destroys its mesh ends well, too. If an exception destroys the mesh, ranks that wait
/// for this rank are told.
MeshGroups::~MeshGroups() {
  {
    Living& known = living();
    const MutexLock lock(known.mutex);
    known.meshes.erase(this);
  }
  if (!status().ok()) return;
  if (std::uncaught_exceptions() == 0) {
    watch_.tell_end();
    return;
  }
  try {
    tell_others(make_error(ExitCode::kInternal, "an exception has left the part of its program that uses other ranks"));
  } catch (const std::exception&) {  // there is no memory for the text; the exception under way has the reason
  }
}

MeshGroups::Living& MeshGroups::living() {
  static Living* const living = [] {
    auto* const known = new Living;  // it is never deleted: threads may destroy meshes until the process has ended
    ::on_exit(
        [](int code, void* given) {
          Living& known = *static_cast<Living*>(given);
          if (code != 0 || getpid() != known.process) return;
          const MutexLock lock(known.mutex);
          for (const MeshGroups* mesh : known.meshes)
            if (mesh->status().ok()) mesh->watch_.tell_end();
        },
        known);
    return known;
  }();
  return *living;
}

Mesh MeshGroups::make_mesh(Topology topology, std::shared_ptr<GroupFactory> factory,
                           std::shared_ptr<KeyValueStore> store) {
  if (auto recorder = FlightRecorder::from_environment(topology.rank, topology.world_size))
    factory = std::make_shared<RecordedGroups>(std::move(factory), std::move(recorder));
  return Mesh(std::shared_ptr<MeshGroups>(new MeshGroups(std::move(topology), std::move(factory), std::move(store))));
}

std::string MeshGroups::unique_name(int replicate, int shard) {
  const MutexLock lock(mutex_);
  const int times = times_asked_[{replicate, shard}]++;
  return std::to_string(replicate) + "x" + std::to_string(shard) + "." + std::to_string(times) + ".";
}

absl::StatusOr<std::shared_ptr<Collectives>> MeshGroups::make_group(const std::string& family, const std::string& name,
                                                                    GroupUse use, const GroupRanks& ranks) {
  std::vector<int> world_ranks(ranks.count);
  for (int i = 0; i < ranks.count; ++i) world_ranks[i] = ranks.first + i * ranks.stride;
  TESSERA_ASSIGN_OR_RETURN(auto group, watch_.watched(family + name, family, ranks,
                                                      [&] { return factory_->make(family + name, world_ranks, use); }));
  const MutexLock lock(mutex_);
  if (!aborted_.ok()) group->abort(aborted_);
  groups_.push_back(group);
  return group;
}

absl::StatusOr<MeshAxes> MeshGroups::axes(int replicate, int shard) {
  if (replicate < 1 || shard < 1 || static_cast<std::int64_t>(replicate) * shard != topology_.world_size)
    return make_error(ExitCode::kConfig, "mesh of replicate " + std::to_string(replicate) + " x shard " +
                                             std::to_string(shard) + " does not make the world of " +
                                             std::to_string(topology_.world_size) +
                                             " ranks. [T0472] hint: their product is the number of ranks");
  MeshAxes axes;
  axes.replicate_size = replicate;
  axes.shard_size = shard;
  axes.replicate_index = topology_.rank / shard;
  axes.shard_index = topology_.rank % shard;
  const std::string name = unique_name(replicate, shard);
  const int first = axes.replicate_index * shard;
  TESSERA_ASSIGN_OR_RETURN(axes.gather, make_group(name, "gather", GroupUse::kGather, {first, shard, 1}));
  TESSERA_ASSIGN_OR_RETURN(axes.reduce, make_group(name, "reduce", GroupUse::kOther, {first, shard, 1}));
  TESSERA_ASSIGN_OR_RETURN(axes.replicate,
                           make_group(name, "replicate", GroupUse::kOther, {axes.shard_index, replicate, shard}));
  TESSERA_ASSIGN_OR_RETURN(axes.world, make_group(name, "world", GroupUse::kOther, {0, topology_.world_size, 1}));
  axes.control = factory_->control_of(axes.world);
  return axes;
}

absl::StatusOr<MeshAxes> MeshGroups::within_replica(const MeshAxes& axes) {
  MeshAxes own = axes;
  own.replicate_size = 1;
  own.replicate_index = 0;
  const std::string name = unique_name(axes.replicate_size, axes.shard_size);
  const int first = axes.replicate_index * axes.shard_size;
  TESSERA_ASSIGN_OR_RETURN(own.replicate, make_group(name, "alone", GroupUse::kOther, {topology_.rank, 1, 1}));
  TESSERA_ASSIGN_OR_RETURN(own.world, make_group(name, "replica", GroupUse::kOther, {first, axes.shard_size, 1}));
  own.control = factory_->control_of(own.world);
  return own;
}

absl::StatusOr<std::shared_ptr<Collectives>> MeshGroups::secondary(const MeshAxes& axes, int ranks) {
  // If replicas train apart, the axes do not show which replica this rank belongs to.
  const int first = topology_.rank - axes.shard_index % ranks;
  return make_group(unique_name(axes.replicate_size, axes.shard_size), "secondary", GroupUse::kGather,
                    {first, ranks, 1});
}

absl::StatusOr<HostAxes> MeshGroups::on_host(const MeshAxes& axes, bool on_shard, bool on_replicate) {
  HostAxes host;
  const int replicate = axes.replicate_size, shard = axes.shard_size;
  const std::string name = unique_name(replicate, shard);
  if (on_shard && shard > 1) {
    const int first = axes.replicate_index * shard;
    TESSERA_ASSIGN_OR_RETURN(host.reduce, make_group(name, "reduce", GroupUse::kOnHost, {first, shard, 1}));
  }
  if (on_replicate && replicate > 1) {
    TESSERA_ASSIGN_OR_RETURN(host.replicate,
                             make_group(name, "replicate", GroupUse::kOnHost, {axes.shard_index, replicate, shard}));
  }
  return host;
}

absl::StatusOr<std::shared_ptr<Collectives>> MeshGroups::alone() {
  return make_group(unique_name(topology_.world_size, 1), "alone", GroupUse::kOther, {topology_.rank, 1, 1});
}

absl::StatusOr<std::shared_ptr<Collectives>> MeshGroups::make_world(const std::string& purpose, GroupUse use) {
  int times = 0;
  {
    const MutexLock lock(mutex_);
    times = worlds_asked_[purpose]++;
  }
  return make_group(purpose + "." + std::to_string(times), "", use, {0, topology_.world_size, 1});
}

absl::StatusOr<std::shared_ptr<Collectives>> MeshGroups::world(const std::string& purpose) {
  TESSERA_ASSIGN_OR_RETURN(const auto group, make_world(purpose, GroupUse::kOther));
  return factory_->control_of(group);
}

absl::StatusOr<std::shared_ptr<Collectives>> MeshGroups::common_memory(const std::string& purpose) {
  return make_world(purpose, GroupUse::kCommonMemory);
}

absl::StatusOr<std::shared_ptr<Collectives>> MeshGroups::neighbours(const std::string& purpose, int ranks) {
  const int first = topology_.rank / ranks * ranks;
  return make_group(unique_name(topology_.world_size / ranks, ranks), purpose, GroupUse::kCommonMemory,
                    {first, ranks, 1});
}

absl::StatusOr<std::shared_ptr<Collectives>> MeshGroups::shared_world(const std::string& purpose) {
  {
    const MutexLock lock(mutex_);
    if (const auto known = shared_worlds_.find(purpose); known != shared_worlds_.end()) return known->second.control;
  }
  TESSERA_ASSIGN_OR_RETURN(const auto group, make_world(purpose, GroupUse::kOther));
  const auto control = factory_->control_of(group);
  const MutexLock lock(mutex_);
  shared_worlds_[purpose] = {group, control};
  return control;
}

void MeshGroups::abort(const absl::Status& reason) {
  std::vector<std::shared_ptr<Collectives>> groups;
  {
    const MutexLock lock(mutex_);
    if (!aborted_.ok()) return;
    aborted_ = reason;
    groups = living_groups();
    was_told_ = is_told(groups);
  }
  for (const auto& group : groups) group->abort(reason);
  tell_others(reason);
}

/// Tells the ranks with which this rank has no group yet that it gives up.
void MeshGroups::tell_others(const absl::Status& reason) const {
  if (topology_.world_size == 1 || getpid() != process_) return;
  const std::string self = rank_name(topology_.rank, topology_.world_size);
  ask_in_time(store_, [self, reason](KeyValueStore& store) { publish_given_up(store, self, reason); });
}

void MeshGroups::leave() {
  if (topology_.world_size == 1) return;
  // If a call of another rank fails, and that rank finds no other cause, the store tells it that this rank has ended.
  ask_in_time(store_, [rank = topology_.rank](KeyValueStore& store) {
    if (store.set(key_of_ended_rank(rank), "").ok()) store.append(kEndedRanks, std::to_string(rank)).IgnoreError();
  });
  std::vector<std::shared_ptr<Collectives>> groups;
  {
    const MutexLock lock(mutex_);
    const auto user = shared_worlds_.find(kUser);
    for (const auto& weak : groups_) {
      auto group = weak.lock();
      if (group && (user == shared_worlds_.end() || group != user->second.group)) groups.push_back(std::move(group));
    }
  }
  for (const auto& group : groups) group->leave();
}

void MeshGroups::expect_report() {
  const MutexLock lock(mutex_);
  expects_report_ = true;
}

bool MeshGroups::keep_for_report(const MeshAxes& axes) {
  const MutexLock lock(mutex_);
  if (expects_report_) kept_.push_back(axes);
  return expects_report_;
}

absl::Status MeshGroups::status() const {
  const MutexLock lock(mutex_);
  return aborted_;
}

bool MeshGroups::told_by_peer() const {
  std::vector<std::shared_ptr<Collectives>> groups;  // the lock is released before these are destroyed
  const MutexLock lock(mutex_);
  groups = living_groups();
  return was_told_ || is_told(groups);
}

std::vector<std::shared_ptr<Collectives>> MeshGroups::living_groups() const {
  std::vector<std::shared_ptr<Collectives>> groups;
  for (const auto& weak : groups_)
    if (auto group = weak.lock()) groups.push_back(std::move(group));
  return groups;
}

}  // namespace tessera
