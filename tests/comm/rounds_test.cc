// Plays the rounds of collectives without a network. The content of each rank's slices is written as text, so that the
// order of addition shows.

#include <gtest/gtest.h>

#include <bit>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "runtime/comm/rounds/gather_rounds.h"
#include "runtime/comm/rounds/halving_rounds.h"

namespace tessera {
namespace {

constexpr int kMostRanks = 33;

/// Returns "((0+1)+2)", the pairwise tree over ranks [first, first + count).
std::string tree(int first, int count) {
  if (count == 1) return std::to_string(first);
  const int left = static_cast<int>(std::bit_floor(static_cast<unsigned>(count - 1)));
  return "(" + tree(first, left) + "+" + tree(first + left, count - left) + ")";
}

/// A group that plays the rounds of all its ranks.
struct Play {
  explicit Play(int ranks, std::size_t slices) : held(ranks, std::vector<std::string>(slices)), rounds(ranks) {}

  std::vector<std::vector<std::string>> held;  ///< [rank]: its slices
  std::vector<Rounds> rounds;
  std::size_t messages = 0, contributions = 0, sums = 0;  ///< counts of sent messages, and of slices of each kind

  struct Sent {
    SliceMessage message;
    std::vector<std::string> slices;
  };

  /// Advances the ranks' rounds until no rank can advance any more. Returns "", or a text that says what went wrong.
  std::string run() {
    const auto ranks = static_cast<int>(held.size());
    std::map<std::pair<int, int>, std::deque<Sent>> wires;  // key: sender, receiver
    std::vector<std::size_t> at(held.size()), has_sent(held.size());
    for (bool moves = true; moves;) {
      moves = false;
      for (int rank = 0; rank < ranks; ++rank) {
        if (at[rank] == rounds[rank].size()) continue;
        const Round& round = rounds[rank][at[rank]];
        if (has_sent[rank] == at[rank]) {
          for (const SliceMessage& message : round.sends) send(rank, message, wires[{rank, message.peer}]);
          ++has_sent[rank];
          moves = true;
        }
        std::map<int, std::size_t> awaited;  // for each peer: how many messages the rank awaits from it
        for (const SliceMessage& message : round.receives) ++awaited[message.peer];
        bool is_complete = true;
        for (const auto& [peer, count] : awaited) is_complete &= wires[{peer, rank}].size() >= count;
        if (!is_complete) continue;
        for (const SliceMessage& message : round.receives) {
          auto& wire = wires[{message.peer, rank}];
          const Sent sent = wire.front();
          wire.pop_front();
          if (sent.message.first != message.first || sent.message.count != message.count ||
              sent.message.is_contribution != message.is_contribution)
            return "rank " + std::to_string(rank) + " expects another message";
          receive(rank, round.adds, message, sent);
        }
        ++at[rank];
        moves = true;
      }
    }
    for (int rank = 0; rank < ranks; ++rank)
      if (at[rank] < rounds[rank].size()) return "rank " + std::to_string(rank) + " waits forever";
    for (const auto& [ends, wire] : wires)
      if (!wire.empty()) return "a message is left";
    return "";
  }

 private:
  void send(int rank, const SliceMessage& message, std::deque<Sent>& wire) {
    const auto begin = held[rank].begin() + static_cast<std::ptrdiff_t>(message.first);
    wire.push_back({message, {begin, begin + static_cast<std::ptrdiff_t>(message.count)}});
    ++messages;
    (message.is_contribution ? contributions : sums) += message.count;
    for (const std::string& slice : wire.back().slices)
      EXPECT_TRUE(!message.is_contribution || slice == std::to_string(rank)) << slice << " is no contribution";
  }
  void receive(int rank, bool adds, const SliceMessage& message, const Sent& sent) {
    for (std::size_t i = 0; i < message.count; ++i) {
      std::string& mine = held[rank][message.first + i];
      const std::string& other = sent.slices[i];
      if (!adds)
        mine = other;
      else
        mine = message.peer < rank ? "(" + other + "+" + mine + ")" : "(" + mine + "+" + other + ")";
    }
  }
};

std::size_t ceil_log2(int ranks) { return static_cast<std::size_t>(std::bit_width(static_cast<unsigned>(ranks - 1))); }

/// Returns the sizes of the binary blocks that `ranks` ranks form, beginning with the largest.
std::vector<std::size_t> block_sizes(int ranks) {
  std::vector<std::size_t> blocks;
  for (auto left = static_cast<std::size_t>(ranks); left > 0; left -= blocks.back())
    blocks.push_back(std::bit_floor(left));
  return blocks;
}

std::size_t messages_of_addition(int ranks) {
  const std::vector<std::size_t> blocks = block_sizes(ranks);
  std::size_t messages = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    messages += blocks[i] * static_cast<std::size_t>(std::countr_zero(blocks[i]));
    if (i > 0) messages += blocks[i - 1];
  }
  return messages;
}

TEST(Rounds, GathersBringEverySliceToEveryRank) {
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    for (const auto& [gather, is_ring] : {std::pair{&ring_gather, true}, std::pair{&doubling_gather, false}}) {
      const auto n = static_cast<std::size_t>(ranks);
      Play play(ranks, n);
      for (int rank = 0; rank < ranks; ++rank) {
        play.held[rank][rank] = std::to_string(rank);
        play.rounds[rank] = gather(rank, ranks);
        EXPECT_EQ(play.rounds[rank].size(), is_ring ? n - 1 : ceil_log2(ranks));
      }
      ASSERT_EQ(play.run(), "") << ranks << " ranks";
      for (int rank = 0; rank < ranks; ++rank)
        for (int q = 0; q < ranks; ++q) ASSERT_EQ(play.held[rank][q], std::to_string(q)) << ranks << " ranks";
      const std::size_t rounds = ceil_log2(ranks);
      EXPECT_EQ(play.messages, is_ring ? n * (n - 1) : n * rounds + (n - 1 - rounds)) << ranks << " ranks";
      EXPECT_EQ(play.sums, n * (n - 1));
      EXPECT_EQ(play.contributions, 0u);
    }
  }
}

TEST(Rounds, HalvingReduceScatterAddsAsThePairwiseTree) {
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    const auto n = static_cast<std::size_t>(ranks);
    const StridedSlices slices(n);
    Play play(ranks, n);
    for (int rank = 0; rank < ranks; ++rank) {
      play.held[rank].assign(n, std::to_string(rank));
      play.rounds[rank] = halving_reduce_scatter(rank, ranks, slices);
    }
    ASSERT_EQ(play.run(), "") << ranks << " ranks";
    for (std::size_t place = 0; place < n; ++place)
      EXPECT_EQ(play.held[slices.order()[place]][place], tree(0, ranks)) << ranks << " ranks";
    const std::size_t others = n - std::bit_floor(n);
    EXPECT_EQ(play.messages, messages_of_addition(ranks) + others) << ranks << " ranks";
    EXPECT_EQ(play.contributions, ranks == 1 ? 0 : n * ((n + 1) / 2)) << ranks << " ranks";
    EXPECT_EQ(play.contributions + play.sums, n * (n - 1) + others) << ranks << " ranks";
  }
}

TEST(Rounds, HalvingAllReduceAddsAsThePairwiseTree) {
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    const auto n = static_cast<std::size_t>(ranks), slices = static_cast<std::size_t>(halving_slices(ranks));
    EXPECT_EQ(slices, std::bit_floor(n));
    Play play(ranks, slices);
    for (int rank = 0; rank < ranks; ++rank) {
      play.held[rank].assign(slices, std::to_string(rank));
      play.rounds[rank] = halving_all_reduce(rank, ranks);
    }
    ASSERT_EQ(play.run(), "") << ranks << " ranks";
    for (const auto& held : play.held)
      for (const std::string& sum : held) EXPECT_EQ(sum, tree(0, ranks)) << ranks << " ranks";
    EXPECT_EQ(play.messages, 2 * messages_of_addition(ranks)) << ranks << " ranks";
    EXPECT_EQ(play.contributions, ranks == 1 ? 0 : slices * ((n + 1) / 2)) << ranks << " ranks";
    EXPECT_EQ(play.contributions + play.sums, 2 * slices * (n - 1)) << ranks << " ranks";
  }
}

TEST(StridedSlices, SlicesOfOneRemainderAreNeighbours) {
  for (std::size_t count = 1; count <= 40; ++count) {
    const StridedSlices slices(count);
    ASSERT_EQ(slices.order().size(), count);
    for (std::size_t modulus = 1; modulus <= 2 * count; modulus *= 2) {
      std::size_t in_runs = 0;
      for (std::size_t remainder = 0; remainder < modulus; ++remainder) {
        const StridedSlices::Run run = slices.run_of(remainder, modulus);
        for (std::size_t i = 0; i < run.count; ++i) EXPECT_EQ(slices.order()[run.first + i] % modulus, remainder);
        in_runs += run.count;
      }
      EXPECT_EQ(in_runs, count);
    }
  }
}

}  // namespace
}  // namespace tessera
