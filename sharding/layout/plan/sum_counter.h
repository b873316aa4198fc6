#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace tessera {

/// The neighbouring microbatches [begin, end) of a step: a rank's run, or a node of the tree over all microbatches.
struct TreeBlock {
  std::int64_t begin = 0, end = 0;
  std::int64_t numel() const { return end - begin; }
  friend bool operator==(const TreeBlock&, const TreeBlock&) = default;
};

/// Returns the largest node of the pairwise tree over `all` leaves (collectives.h, rule 3) with which `run` begins. A
/// node has 2^k leaves and begins at a multiple of 2^k; the last node of a level may be cut off by the end of the
/// leaves. REQUIRES: 0 <= run.begin < run.end <= all.
inline TreeBlock first_block(TreeBlock run, std::int64_t all) {
  const std::int64_t most = run.begin == 0 ? all : run.begin & -run.begin;
  if (run.end == all && run.numel() <= most) return run;
  const auto power = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(run.numel())));
  return {run.begin, run.begin + std::min(most, power)};
}

/// Returns the nodes that form `run`, in order. The list is the shortest one with nodes of the tree over `all` leaves.
/// There are at most 2 log2(all) nodes.
inline std::vector<TreeBlock> blocks_of(TreeBlock run, std::int64_t all) {
  std::vector<TreeBlock> blocks;
  while (run.begin < run.end) run.begin = blocks.emplace_back(first_block(run, all)).end;
  return blocks;
}

/// The order in which a rank adds up the microbatches of its run in the pairwise tree (collectives.h, rule 3) over all
/// microbatches of the step. Sums wait in places (buffers) with the numbers 0, 1, ... Each place holds the sum of one
/// node, and earlier nodes have lower numbers. A new sum is added to the last sum that waits, as long as the two form a
/// node. The result then waits behind the sums that are left. After the last microbatch of the run, one sum waits for
/// each node of the run (`blocks_of`). Only the total waits if the run is a node, such as all microbatches of a step.
///
/// MemoryPlan plans the memory of the places, and Reducer adds the sums. The last sum of a run stays where its
/// microbatch's gradients are, so it needs no place. REQUIRES: the run is not empty.
class SumCounter {
 public:
  /// The largest number of sums to which one sum is added, since a run has at most 10^6 microbatches
  /// (gradient_accumulation).
  static constexpr int kMostJoined = 20;

  /// Makes the counter of a run of `rounds` microbatches that is a whole tree, or a subtree.
  explicit SumCounter(std::int64_t rounds) : SumCounter({0, rounds}, rounds) {}
  SumCounter(TreeBlock run, std::int64_t all) : run_(run), all_(all) {}

  /// The treatment of one microbatch's sum. The sum is added to the sums in the places from `place + joined - 1` down
  /// to `place`, in this order, and then waits in `place`. The run's last sum stays where it is.
  struct Turn {
    int place = 0, joined = 0;
    bool is_last = false;
  };
  Turn turn(std::int64_t round) const {
    const int before = blocks_before(round), after = blocks_before(round + 1);
    return {after - 1, before + 1 - after, round + 1 == rounds()};
  }
  /// Returns the number of microbatches of the run.
  std::int64_t rounds() const { return run_.numel(); }
  /// Returns the number of nodes that are left when the run has ended.
  int blocks() const { return blocks_before(rounds()); }
  /// Returns the number of places that the sums of the run need. For a run that is a subtree, the number is log2 of the
  /// microbatches, rounded down: 0 for one microbatch.
  int places() const {
    int most = 0, index = 0;
    for (TreeBlock rest = run_; rest.begin < rest.end; ++index) {
      const TreeBlock block = first_block(rest, all_);
      most = std::max(most, index + static_cast<int>(std::bit_width(static_cast<std::uint64_t>(block.numel()))) - 1);
      rest.begin = block.end;
    }
    return most;
  }

 private:
  int blocks_before(std::int64_t round) const {
    int count = 0;
    for (TreeBlock rest{run_.begin, run_.begin + round}; rest.begin < rest.end; ++count)
      rest.begin = first_block(rest, all_).end;
    return count;
  }

  TreeBlock run_;
  std::int64_t all_;
};

/// These functions return the largest numbers of nodes (SumCounter::blocks) and places (SumCounter::places) of any run
/// of at most `longest` microbatches. The tree may have any size, and the run any position in it. Nodes become larger
/// towards the middle of a run and then smaller again; at most two have the same size.
inline int most_blocks(std::int64_t longest) {
  // nodes of 1, 2, ..., 2^(sizes - 1) leaves and back down to 1, with a node of 2^sizes between if it fits
  int sizes = 0;
  while (2 * ((std::int64_t{2} << sizes) - 1) <= longest) ++sizes;
  const bool has_middle = 2 * ((std::int64_t{1} << sizes) - 1) + (std::int64_t{1} << sizes) <= longest;
  return 2 * sizes + (has_middle ? 1 : 0);
}
inline int most_places(std::int64_t longest) {
  int most = 0;
  for (int size = 0; (std::int64_t{1} << size) <= longest; ++size) {
    for (int before = 0; before <= size; ++before) {  // number of smaller nodes before the largest
      const std::int64_t numel = (std::int64_t{1} << before) - 1 + (std::int64_t{1} << size);
      if (numel <= longest) most = std::max(most, before + size);
      if (numel + (std::int64_t{1} << size) <= longest) most = std::max(most, before + 1 + size);
    }
  }
  return most;
}

}  // namespace tessera
