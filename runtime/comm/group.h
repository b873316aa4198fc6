#pragma once

#include <string>
#include <vector>

namespace tessera {

/// What a group of ranks is for.
enum class GroupUse {
  kGather,  ///< all-gathers: ranks gather from and into the same places of their memory of the group
  kOther,   ///< all else, such as reductions: each rank decides for itself in which place a bucket waits
};

/// Who is in a group of ranks and who this one is. Messages name *world* ranks, so that a user need not know
/// groups.
struct Group {
  std::string name;              ///< unique in the job together with the ranks
  int rank = 0;                  ///< this rank's place in `world_ranks`
  std::vector<int> world_ranks;  ///< ascending
  int world_size = 1;
  GroupUse use = GroupUse::kOther;
  double timeout_s = 600.0;       ///< of one collective
  double init_timeout_s = 300.0;  ///< of meeting the other ranks

  int size() const { return static_cast<int>(world_ranks.size()); }
  int world_rank(int member) const { return world_ranks[member]; }
  /// "rank 2"
  std::string who(int member) const { return "rank " + std::to_string(world_ranks[member]); }
  /// "rank 1/4": this rank, as messages begin.
  std::string self() const { return who(rank) + "/" + std::to_string(world_size); }
  /// Name and ranks: what tells this group from every other, "gather.0[0,1]".
  std::string key() const {
    std::string text = name + "[";
    for (std::size_t i = 0; i < world_ranks.size(); ++i) text += (i ? "," : "") + std::to_string(world_ranks[i]);
    return text + "]";
  }
};

/// In the job's store: there once the rank's program has ended well.
inline std::string key_of_ended_rank(int world_rank) { return "ended/" + std::to_string(world_rank); }

}  // namespace tessera
