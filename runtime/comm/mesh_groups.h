#pragma once

#include <absl/status/statusor.h>
#include <sys/types.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/call_watch.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"
#include "tessera/mesh.h"

namespace tessera {

/// Makes groups of ranks. There is one factory for each process (or for each rank, if ranks are threads). It chooses
/// the transport that connects the ranks of a group.
class GroupFactory {
 public:
  virtual ~GroupFactory() = default;
  /// Makes a group. The call is collective over `world_ranks` (ascending; this rank among them): each member calls with
  /// the same name, ranks and use. Group rank i is world rank `world_ranks[i]`. A name is used only once. Errors are
  /// those of the transport.
  virtual absl::StatusOr<std::shared_ptr<Collectives>> make(const std::string& name,
                                                            const std::vector<int>& world_ranks, GroupUse use) = 0;
  /// Returns a group for host memory over the ranks of `group`, which `make` made: the group itself, unless it moves a
  /// GPU's memory.
  virtual std::shared_ptr<Collectives> control_of(const std::shared_ptr<Collectives>& group) { return group; }
};

/// The groups that a mesh of replicate x shard ranks needs. World rank = replicate index * shard_size + shard index, so
/// the ranks of one shard group are neighbours. They are on one host if hosts hold a multiple of shard_size ranks.
struct MeshAxes {
  int replicate_size = 1, shard_size = 1;
  int replicate_index = 0, shard_index = 0;
  std::shared_ptr<Collectives> gather;  ///< the shard axis, for all-gathers
  /// the shard axis again, for reduce-scatters, which never wait for a gather to end
  std::shared_ptr<Collectives> reduce;
  std::shared_ptr<Collectives> replicate;  ///< the replicate axis
  std::shared_ptr<Collectives> world;      ///< all ranks
  /// All ranks, for host memory: `world` itself, unless it moves a GPU's memory.
  std::shared_ptr<Collectives> control;
  /// The ranks that read this rank's gradients directly from its memory ("sync" backups); null if no rank does.
  std::shared_ptr<Collectives> readers = nullptr;
  /// The neighbours on the shard axis that together hold a second copy of the parameters ("secondary"), for
  /// all-gathers; null if there is no second copy.
  std::shared_ptr<Collectives> secondary = nullptr;

  /// Returns OK, or the first failure among the groups except `readers` (Collectives::status).
  absl::Status status() const;
};

/// Groups over which ranks with GPUs compress their messages (Collectives::compressed_part), in the memory of their
/// hosts. A group is null for an axis of one rank, and for an axis that was not asked for.
struct HostAxes {
  std::shared_ptr<Collectives> reduce, replicate;
};

/// The members of a Mesh; all copies of the Mesh share them. This class makes groups of ranks and ends them. It is
/// thread-safe.
class MeshGroups {
 public:
  ~MeshGroups();
  static Mesh make_mesh(Topology topology, std::shared_ptr<GroupFactory> factory, std::shared_ptr<KeyValueStore> store);
  static MeshGroups& of(const Mesh& mesh) { return *mesh.groups_; }

  const Topology& topology() const { return topology_; }
  KeyValueStore& store() const { return *store_; }

  /// Makes the axes of a mesh shape. The call is collective over the world. Error: 78 unless `replicate * shard` is the
  /// world size. If a second Engine asks for the same shape, it gets new groups.
  absl::StatusOr<MeshAxes> axes(int replicate, int shard);

  /// Returns the axes of this rank's replica, as if there were no other replica. The call is collective over the world.
  /// `axes` are the axes of the mesh; the result has the same shard axis. The result is never used for a GPU's memory.
  absl::StatusOr<MeshAxes> within_replica(const MeshAxes& axes);

  /// Makes the group of `ranks` neighbours on the shard axis of `axes` with which this rank holds a second copy of the
  /// parameters (MeshAxes::secondary). The call is collective over the world. REQUIRES: `ranks` divides the shard axis.
  absl::StatusOr<std::shared_ptr<Collectives>> secondary(const MeshAxes& axes, int ranks);

  /// Makes the groups over which ranks with GPUs compress their messages, on the axes that are asked for. These groups
  /// use Gloo. The call is collective over the world. `axes` are the axes of the mesh. Errors are those of
  /// gloo_collectives.
  absl::StatusOr<HostAxes> on_host(const MeshAxes& axes, bool on_shard, bool on_replicate);

  /// Makes the group of this rank alone, for the memory that the calls of `axes` move. The call is collective.
  absl::StatusOr<std::shared_ptr<Collectives>> alone();

  /// Makes a new group of all ranks for host memory. No other code uses the group. The call is collective. The name of
  /// the group contains `purpose`.
  absl::StatusOr<std::shared_ptr<Collectives>> world(const std::string& purpose);
  /// Does the same as `world`. If all ranks are on one host and have GPUs, the group shares memory of the host
  /// (Collectives::shares_memory), which the group of `world` does not.
  absl::StatusOr<std::shared_ptr<Collectives>> common_memory(const std::string& purpose);
  /// Makes the group of this rank and its neighbours in the world: the first `ranks` ranks are one group, the next
  /// `ranks` another. The group is for host memory, and no other code uses it. The call is collective over the world.
  /// REQUIRES: `ranks` divides the world size.
  absl::StatusOr<std::shared_ptr<Collectives>> neighbours(const std::string& purpose, int ranks);
  /// Returns the group of a purpose. The first call makes it and is collective; the group lives as long as the mesh.
  absl::StatusOr<std::shared_ptr<Collectives>> shared_world(const std::string& purpose);
  /// Returns the group for the messages that the program itself sends (tessera/collectives.h).
  absl::StatusOr<std::shared_ptr<Collectives>> user_group() { return shared_world(kUser); }

  /// Returns the watch, which finds ranks that wait for each other.
  CallWatch& watch() { return watch_; }

  /// Tells every rank of every group of this mesh, and ranks that wait to make a group with this rank, that this rank
  /// gives up, and the reason. Only the first reason counts.
  void abort(const absl::Status& reason);
  /// Announces that this rank's program ends well. Ranks that have more data and still need this rank for a call are
  /// told that this rank has ended. The program's own group stays usable (user_group), so that ranks can wait for each
  /// other.
  void leave();
  /// Returns OK, or the reason that this rank gave to `abort`.
  absl::Status status() const;
  /// Returns whether a group of this mesh has failed because a peer gave up (is_told_by_peer). If so, this rank ends
  /// because of that peer. The answer stays true after `abort`, even if the group no longer exists.
  bool told_by_peer() const;

  /// Notes that a later call of `abort` will report the exception that ends this rank, with its text. tessera::run and
  /// run_ranks call it.
  void expect_report();
  /// Stores the groups of an object that an exception destroys, so that the report can still reach the peers. Returns
  /// false if no report is expected: the caller then has to tell the peers.
  bool keep_for_report(const MeshAxes& axes);

 private:
  MeshGroups(Topology topology, std::shared_ptr<GroupFactory> factory, std::shared_ptr<KeyValueStore> store);
  static constexpr const char* kUser = "user";
  /// The meshes of this process. If the process exits with code 0, its end counts as a good end of each mesh that has
  /// not failed (CallWatch::tell_end). A forked child of this process tells nothing.
  struct Living {
    const pid_t process = getpid();
    Mutex mutex;
    std::set<const MeshGroups*> meshes ABSL_GUARDED_BY(mutex);
  };
  static Living& living();
  struct SharedWorld {
    std::shared_ptr<Collectives> group, control;
  };

  void tell_others(const absl::Status& reason) const;
  /// Returns the groups that still exist. The caller releases them without the lock: a group's destructor may wait for
  /// a thread that calls `abort`.
  std::vector<std::shared_ptr<Collectives>> living_groups() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string unique_name(int replicate, int shard);
  absl::StatusOr<std::shared_ptr<Collectives>> make_world(const std::string& purpose, GroupUse use);
  /// `family` has the meaning of WaitReport::Group::family.
  absl::StatusOr<std::shared_ptr<Collectives>> make_group(const std::string& family, const std::string& name,
                                                          GroupUse use, const GroupRanks& ranks);

  const Topology topology_;
  const std::shared_ptr<GroupFactory> factory_;
  const std::shared_ptr<KeyValueStore> store_;
  const pid_t process_ = getpid();

  mutable Mutex mutex_;
  // The key is the groups' shape, and the count makes group names differ.
  std::map<std::pair<int, int>, int> times_asked_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, int> worlds_asked_ ABSL_GUARDED_BY(mutex_);           // key: purpose
  std::map<std::string, SharedWorld> shared_worlds_ ABSL_GUARDED_BY(mutex_);  // key: purpose
  std::vector<std::weak_ptr<Collectives>> groups_ ABSL_GUARDED_BY(mutex_);
  absl::Status aborted_ ABSL_GUARDED_BY(mutex_);
  bool was_told_ ABSL_GUARDED_BY(mutex_) = false;  ///< whether a peer had given up when `abort` was called
  bool expects_report_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<MeshAxes> kept_ ABSL_GUARDED_BY(mutex_);
  CallWatch watch_;  // the last member is destroyed first, since it may call `abort`
};

/// Makes a mesh; transports and tests call it.
inline Mesh make_mesh(Topology topology, std::shared_ptr<GroupFactory> factory, std::shared_ptr<KeyValueStore> store) {
  return MeshGroups::make_mesh(std::move(topology), std::move(factory), std::move(store));
}
/// Returns the MeshGroups of a mesh.
inline MeshGroups& groups_of(const Mesh& mesh) { return MeshGroups::of(mesh); }

}  // namespace tessera
