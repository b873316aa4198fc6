#pragma once

// See docs/glossary.md: dealt, flat group.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/asynchronous/servers/served_part.h"
#include "sharding/layout/layout.h"
#include "tessera/strategy.h"

namespace tessera {

/// Returns whether a group is one shard, since its rule needs norms of parameters, or whole tensors. `has_matrices` is
/// true if the group's tensors are updated as matrices, or as a whole (GroupShape::matrices).
bool is_served_whole(OptimizerType type, bool has_matrices);

/// Decides which elements of the trainable flat groups each parameter server owns, and which rank of a replica pushes
/// these elements (AsynchronousConfig::replica_ranks). A group of a rule of single elements is cut over all servers and
/// all ranks of a replica. A group that is one shard is dealt to one server and one rank. The largest group is dealt
/// first, and each group goes to the pair of server and rank that has the fewest elements so far. A ServedCut consists
/// of integers, which are the same on workers and servers.
class ServedCut {
 public:
  struct Group {
    std::int64_t numel = 0;
    bool is_whole = false;
  };
  ServedCut() = default;
  /// `pieces` is the number of ranks of a replica.
  ServedCut(std::vector<Group> groups, int servers, int pieces);

  /// Returns the elements of a group that `server` owns and the `piece`-th rank of a replica pushes; numel is 0 if
  /// there are none.
  Extent shard(std::size_t group, int server, int piece) const;
  bool is_whole(std::size_t group) const { return groups_[group].is_whole; }
  /// Returns the rank of a replica that pushes a whole group. REQUIRES: is_whole(group).
  int piece_of(std::size_t group) const { return places_[group] / servers_; }

 private:
  int server_of(std::size_t group) const { return places_[group] % servers_; }

  std::vector<Group> groups_;
  int servers_ = 1, pieces_ = 1;
  std::vector<int> places_;  ///< [group]: piece * servers + server; 0 if the group is cut
};

}  // namespace tessera
