#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "runtime/comm/mesh_groups.h"

namespace tessera {

/// Options of run_ranks, which runs ranks as threads of this process: for tests, for small studies, and for ranks that
/// only read their commits (engine/moved_commits.h).
struct ThreadRanks {
  int ranks = 1;
  int hosts = 1;  ///< number of pretended hosts (Topology::host, local_rank); groups across hosts are hierarchical
  /// Number of ranks on each pretended host, if the numbers are unequal. They add up to `ranks`, and `hosts` then has
  /// no effect.
  std::vector<int> ranks_of_hosts = {};
  double timeout_s = 60.0;
  /// If given, this function makes a factory out of each rank's own factory, and the rank makes its groups with the new
  /// factory.
  std::function<std::shared_ptr<GroupFactory>(std::shared_ptr<GroupFactory>)> wrap_groups = {};
};
/// Runs `body` once per rank, each on its own thread, and joins them all. A rank that throws aborts the other ranks.
/// The exception of the rank that failed first is then thrown here.
void run_ranks(const ThreadRanks& options, const std::function<void(const Mesh&)>& body);

}  // namespace tessera
