#include "runtime/comm/rounds/halving_rounds.h"

#include <bit>
#include <cstddef>

#include "runtime/base/seeded_fault.h"

namespace tessera {
namespace {

struct Block {
  std::size_t first = 0, size = 0;  ///< first rank and number of ranks of a block; size 0: no such block
};

/// One rank's position in the binary blocks, and the rounds that it makes.
class Halving {
 public:
  Halving(int rank, int ranks, const StridedSlices& slices) : slices_(slices), is_lone_(false) {
    auto left = static_cast<std::size_t>(ranks);
    const auto own = static_cast<std::size_t>(rank);
    for (Block block; left > 0; left -= block.size) {
      before_ = own_;
      own_ = block = {block.first + block.size, std::bit_floor(left)};
      if (own >= block.first + block.size) continue;
      const std::size_t rest = left - block.size;
      after_ = {block.first + block.size, rest == 0 ? 0 : std::bit_floor(rest)};
      break;
    }
    member_ = own - own_.first;
    is_lone_ = own_.size == 1;
  }

  /// Adds rounds until the first block has the sums.
  void add_up(Rounds& rounds) const {
    for (std::size_t distance = 1; distance < own_.size; distance *= 2) {
      const bool is_first = distance == 1;
      rounds.push_back({.sends = {to_partner(distance, partner(distance), is_first)},
                        .receives = {to_partner(distance, member_, is_first)},
                        .adds = true});
    }
    const bool adds = !seeded_fault(SeededFault::kLaterBlockReplaces);
    if (after_.size > 0) rounds.push_back({.sends = {}, .receives = {with_later(after_.size == 1)}, .adds = adds});
    if (before_.size > 0) rounds.push_back({.sends = with_earlier(is_lone_), .receives = {}});
  }

  /// Adds rounds from the first block on, until every rank has all sums.
  void spread(Rounds& rounds) const {
    if (before_.size > 0) rounds.push_back({.sends = {}, .receives = with_earlier(false)});
    if (after_.size > 0) rounds.push_back({.sends = {with_later(false)}, .receives = {}});
    for (std::size_t distance = own_.size / 2; distance > 0; distance /= 2)
      rounds.push_back({.sends = {to_partner(distance, member_, false)},
                        .receives = {to_partner(distance, partner(distance), false)}});
  }

 private:
  std::size_t partner(std::size_t distance) const { return member_ ^ distance; }

  SliceMessage message(std::size_t peer, std::size_t remainder, std::size_t modulus, bool is_contribution) const {
    const StridedSlices::Run run = slices_.run_of(remainder, modulus);
    return {static_cast<int>(peer), run.first, run.count, is_contribution};
  }
  /// Returns a message to or from the partner at `distance`: the slices that `member` has after that exchange.
  SliceMessage to_partner(std::size_t distance, std::size_t member, bool is_contribution) const {
    return message(own_.first + partner(distance), member % (2 * distance), 2 * distance, is_contribution);
  }
  /// Returns a message to or from the one rank of the next block that has this rank's slices.
  SliceMessage with_later(bool is_contribution) const {
    return message(after_.first + member_ % after_.size, member_, own_.size, is_contribution);
  }
  /// Returns the messages to or from those ranks of the block before this block that share this rank's slices.
  std::vector<SliceMessage> with_earlier(bool is_contribution) const {
    std::vector<SliceMessage> messages;
    for (std::size_t other = member_; other < before_.size; other += own_.size)
      messages.push_back(message(before_.first + other, other, before_.size, is_contribution));
    return messages;
  }

  const StridedSlices& slices_;
  Block before_, own_, after_;
  std::size_t member_ = 0;  ///< this rank's place in its block
  bool is_lone_;
};

}  // namespace

Rounds halving_reduce_scatter(int rank, int ranks, const StridedSlices& slices) {
  Rounds rounds;
  Halving(rank, ranks, slices).add_up(rounds);
  const int first_block = halving_slices(ranks);
  const auto slice_of = [&](int peer, int owner) -> SliceMessage {
    return {peer, slices.run_of(static_cast<std::size_t>(owner), std::bit_ceil(static_cast<std::size_t>(ranks))).first};
  };
  if (rank >= first_block) rounds.push_back({.sends = {}, .receives = {slice_of(rank - first_block, rank)}});
  if (rank + first_block < ranks)
    rounds.push_back({.sends = {slice_of(rank + first_block, rank + first_block)}, .receives = {}});
  return rounds;
}

int halving_slices(int ranks) { return static_cast<int>(std::bit_floor(static_cast<unsigned>(ranks))); }

Rounds halving_all_reduce(int rank, int ranks) {
  const StridedSlices slices(static_cast<std::size_t>(halving_slices(ranks)));
  const Halving halving(rank, ranks, slices);
  Rounds rounds;
  halving.add_up(rounds);
  halving.spread(rounds);
  return rounds;
}

}  // namespace tessera
