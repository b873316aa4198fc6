#pragma once

#include <string>
#include <vector>

#include "runtime/base/rank_name.h"

namespace tessera {

/// The uses of a group of ranks.
enum class GroupUse {
  kGather,  ///< all-gathers: each rank gathers from and into the same offsets of its memory of the group
  kOther,   ///< all other calls, such as reductions: each rank chooses the offsets of its buckets
  kOnHost,  ///< compressed sums of a GPU's ranks: the group is for the memory of their hosts (MeshGroups::on_host)
  /// groups for host memory, even if other groups move a GPU's memory; ranks on one host map this memory together
  /// (MeshGroups::common_memory)
  kCommonMemory,
};

/// The ranks of a group, and the place of this rank among them. Messages name *world* ranks, so that a user need not
/// understand groups. A Group is a plain value.
struct Group {
  std::string name;              ///< name of the group; together with the ranks it is unique in the job
  int rank = 0;                  ///< index of this rank in `world_ranks`
  std::vector<int> world_ranks;  ///< ascending
  int world_size = 1;
  GroupUse use = GroupUse::kOther;
  double timeout_s = 600.0;       ///< limit of one collective
  double init_timeout_s = 300.0;  ///< limit of the rendezvous with the other ranks

  int size() const { return static_cast<int>(world_ranks.size()); }
  int world_rank(int member) const { return world_ranks[member]; }
  /// Returns a text such as "rank 2".
  std::string who(int member) const { return "rank " + std::to_string(world_ranks[member]); }
  /// Returns this rank's name as messages begin with it: "rank 1/4".
  std::string self() const { return rank_name(world_ranks[rank], world_size); }
  /// Returns the name and ranks. They distinguish this group from every other group: "gather.0[0,1]".
  std::string key() const {
    std::string text = name + "[";
    for (std::size_t i = 0; i < world_ranks.size(); ++i) text += (i ? "," : "") + std::to_string(world_ranks[i]);
    return text + "]";
  }
};

/// Returns a key in the job's store that exists once the rank's program has ended well. kEndedRanks is the store's list
/// of such ranks.
inline std::string key_of_ended_rank(int world_rank) { return "ended/" + std::to_string(world_rank); }
inline constexpr const char* kEndedRanks = "ended";

}  // namespace tessera
