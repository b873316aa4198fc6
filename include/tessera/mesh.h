#pragma once

#include <memory>

#include "tessera/topology.h"

namespace tessera {

class MeshGroups;

/// All ranks of a job. `tessera::init` makes it, an Engine arranges it in the axes of its strategy. Cheap to copy; copies
/// share everything.
class Mesh {
 public:
  const Topology& topology() const;
  int rank() const { return topology().rank; }
  int world_size() const { return topology().world_size; }
  /// Rank 0, which prints and writes what one rank is enough for.
  bool is_main() const { return rank() == 0; }

 private:
  friend class MeshGroups;
  explicit Mesh(std::shared_ptr<MeshGroups> groups);
  std::shared_ptr<MeshGroups> groups_;
};

}  // namespace tessera
