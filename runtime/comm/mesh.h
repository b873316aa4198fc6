#pragma once

#include <absl/status/statusor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/collectives.h"
#include "runtime/comm/key_value_store.h"
#include "runtime/comm/topology.h"
#include "runtime/config/strategy.h"

namespace tessera {

/// How the name of the group ends that makes all-gathers. Ranks gather from and into the same places of their memory of it;
/// in which place a bucket waits to be reduced each decides alone.
inline constexpr std::string_view kGatherGroup = "gather";

/// Makes groups of ranks. One per process (or per rank, on threads); knows which transport joins which ranks.
class GroupFactory {
 public:
  virtual ~GroupFactory() = default;
  /// Collective over `world_ranks` (ascending; this rank among them): each member calls with the same name and ranks.
  /// Group rank i is world rank `world_ranks[i]`. Names are used once.
  virtual absl::StatusOr<std::shared_ptr<Collectives>> make(const std::string& name,
                                                            const std::vector<int>& world_ranks) = 0;
  /// A group that `make` made, for host memory: itself, but where its own memory is a GPU's.
  virtual std::shared_ptr<Collectives> control_of(const std::shared_ptr<Collectives>& group) { return group; }
};

/// The groups that a mesh of replicate x shard ranks needs. World rank = replicate index * shard_size + shard index,
/// so the ranks of one shard group are neighbours, on one host where hosts hold a multiple of shard_size ranks.
struct MeshAxes {
  int replicate_size = 1, shard_size = 1;
  int replicate_index = 0, shard_index = 0;
  std::shared_ptr<Collectives> gather;  ///< the shard axis, for all-gathers
  std::shared_ptr<Collectives> reduce;  ///< the shard axis again, for reduce-scatters: never waits for a gather to end
  std::shared_ptr<Collectives> replicate;  ///< the replicate axis
  std::shared_ptr<Collectives> world;      ///< all ranks
  /// All ranks, for host memory: `world` itself, but where that moves a GPU's.
  std::shared_ptr<Collectives> control;

  /// Ok, or the first failure among the groups (Collectives::status).
  absl::Status status() const;
};

/// All ranks of a job, before and after they are arranged in axes. Cheap to copy; copies share everything.
class Mesh {
 public:
  Mesh(Topology topology, std::shared_ptr<GroupFactory> factory, std::shared_ptr<KeyValueStore> store);

  const Topology& topology() const;
  int rank() const { return topology().rank; }
  int world_size() const { return topology().world_size; }
  KeyValueStore& store() const;

  /// Collective over the world. `replicate * shard` must be the world size (exit code 78 else). A shape asked for again
  /// (by a second Engine) gets groups of its own.
  absl::StatusOr<MeshAxes> axes(int replicate, int shard) const;

  /// Tells every rank of every group made through this mesh that this rank gives up, and why.
  /// The first reason counts.
  void abort(const absl::Status& reason) const;
  /// Ok, or the reason that this rank gave to `abort`.
  absl::Status status() const;

  /// Says that an exception which ends this rank will come to `abort` with its text (tessera::run and run_ranks do
  /// that).
  void expect_report() const;
  /// For what an exception destroys on its way: keeps the groups, so that the report still reaches the peers. False if
  /// none is expected: then only the caller can tell them.
  bool keep_for_report(const MeshAxes& axes) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
