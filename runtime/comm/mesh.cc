#include "runtime/comm/mesh.h"

#include <map>
#include <mutex>
#include <utility>

#include "runtime/base/status.h"

namespace tessera {

struct Mesh::State {
  Topology topology;
  std::shared_ptr<GroupFactory> factory;
  std::shared_ptr<KeyValueStore> store;

  std::mutex mutex;                                // guards the members below
  std::map<std::pair<int, int>, int> times_asked;  // by shape: keeps group names apart
  std::vector<std::weak_ptr<Collectives>> groups;
  absl::Status aborted;
  bool expects_report = false;
  std::vector<MeshAxes> kept;

  std::string unique_name(int replicate, int shard) {
    std::lock_guard lock(mutex);
    const int times = times_asked[{replicate, shard}]++;
    return std::to_string(replicate) + "x" + std::to_string(shard) + "." + std::to_string(times) + ".";
  }

  absl::StatusOr<std::shared_ptr<Collectives>> make(const std::string& name, int first, int count, int stride) {
    std::vector<int> ranks(count);
    for (int i = 0; i < count; ++i) ranks[i] = first + i * stride;
    TESSERA_ASSIGN_OR_RETURN(auto group, factory->make(name, ranks));
    std::lock_guard lock(mutex);
    if (!aborted.ok()) group->abort(aborted);
    groups.push_back(group);
    return group;
  }
};

absl::Status MeshAxes::status() const {
  for (const auto* group : {&gather, &reduce, &replicate, &world}) TESSERA_RETURN_IF_ERROR((*group)->status());
  return absl::OkStatus();
}

Mesh::Mesh(Topology topology, std::shared_ptr<GroupFactory> factory, std::shared_ptr<KeyValueStore> store)
    : state_(std::make_shared<State>()) {
  state_->topology = std::move(topology);
  state_->factory = std::move(factory);
  state_->store = std::move(store);
}

const Topology& Mesh::topology() const { return state_->topology; }
KeyValueStore& Mesh::store() const { return *state_->store; }

absl::StatusOr<MeshAxes> Mesh::axes(int replicate, int shard) const {
  const Topology& topology = state_->topology;
  if (replicate < 1 || shard < 1 || static_cast<std::int64_t>(replicate) * shard != topology.world_size)
    return make_error(ExitCode::kConfig, "mesh of replicate " + std::to_string(replicate) + " x shard " +
                                             std::to_string(shard) + " does not make the world of " +
                                             std::to_string(topology.world_size) + " ranks");
  MeshAxes axes;
  axes.replicate_size = replicate;
  axes.shard_size = shard;
  axes.replicate_index = topology.rank / shard;
  axes.shard_index = topology.rank % shard;
  const std::string name = state_->unique_name(replicate, shard);
  const int first = axes.replicate_index * shard;
  TESSERA_ASSIGN_OR_RETURN(axes.gather, state_->make(name + std::string(kGatherGroup), first, shard, 1));
  TESSERA_ASSIGN_OR_RETURN(axes.reduce, state_->make(name + "reduce", first, shard, 1));
  TESSERA_ASSIGN_OR_RETURN(axes.replicate, state_->make(name + "replicate", axes.shard_index, replicate, shard));
  TESSERA_ASSIGN_OR_RETURN(axes.world, state_->make(name + "world", 0, topology.world_size, 1));
  axes.control = state_->factory->control_of(axes.world);
  return axes;
}

void Mesh::abort(const absl::Status& reason) const {
  std::vector<std::shared_ptr<Collectives>> groups;
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->aborted.ok()) return;
    state_->aborted = reason;
    for (const auto& weak : state_->groups)
      if (auto group = weak.lock()) groups.push_back(std::move(group));
  }
  for (const auto& group : groups) group->abort(reason);
}

void Mesh::expect_report() const {
  std::lock_guard lock(state_->mutex);
  state_->expects_report = true;
}

bool Mesh::keep_for_report(const MeshAxes& axes) const {
  std::lock_guard lock(state_->mutex);
  if (state_->expects_report) state_->kept.push_back(axes);
  return state_->expects_report;
}

absl::Status Mesh::status() const {
  std::lock_guard lock(state_->mutex);
  return state_->aborted;
}

}  // namespace tessera
