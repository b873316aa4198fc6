#pragma once

#include <absl/status/statusor.h>

#include <map>
#include <memory>
#include <string>

#include "runtime/base/mutex.h"
#include "runtime/comm/group.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"

namespace tessera {

class ThreadGroupMemory;  // the control blocks of one group

/// Finds the groups of ranks that are threads of one process, by name and ranks. There is one ThreadRun per run, and
/// all ranks of the run share it. A ThreadRun also ends the groups of a rank whose body is over. It is thread-safe.
class ThreadRun {
 public:
  explicit ThreadRun(const ThreadRanks& options);
  ~ThreadRun();

  /// Returns this rank's side of a group. The first rank that arrives makes the memory.
  absl::StatusOr<std::shared_ptr<Collectives>> join(const Group& group);

  /// Ends every group of rank `world_rank` for its peers, with `reason`. If `reason` is OK, the peers see that the rank
  /// has left.
  void end(int world_rank, const absl::Status& reason);

  const ThreadRanks& options() const { return options_; }

 private:
  std::shared_ptr<ThreadGroupMemory> memory_of(const Group& group);

  const ThreadRanks options_;
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<ThreadGroupMemory>> groups_ ABSL_GUARDED_BY(mutex_);
  std::map<int, absl::Status> ended_ ABSL_GUARDED_BY(mutex_);
};

/// Returns the factory of the groups of one rank of a run. `topology` is the rank's topology. Groups across pretended
/// hosts are hierarchical.
std::shared_ptr<GroupFactory> thread_group_factory(std::shared_ptr<ThreadRun> run, const Topology& topology);

}  // namespace tessera
