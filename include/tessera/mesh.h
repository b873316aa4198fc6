#pragma once

#include <memory>

#include "tessera/topology.h"

namespace tessera {

class MeshGroups;

/// All ranks of a job. `tessera::init` makes the Mesh, and an Engine arranges the ranks in the axes of its strategy. A
/// copy is cheap and shares everything with the original.
class Mesh {
 public:
  /// Returns the place of this process in the job, and how the job was started.
  const Topology& topology() const;
  /// Returns the index of this rank in the job, from 0.
  int rank() const { return topology().rank; }
  /// Returns the number of ranks in the job.
  int world_size() const { return topology().world_size; }
  /// Returns true on rank 0. That rank should do the printing and writing that only one rank must do.
  bool is_main() const { return rank() == 0; }

 private:
  friend class MeshGroups;
  explicit Mesh(std::shared_ptr<MeshGroups> groups);
  std::shared_ptr<MeshGroups> groups_;
};

}  // namespace tessera
