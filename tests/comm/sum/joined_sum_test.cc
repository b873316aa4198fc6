// Tests the order in which successive sums are added. It must be the order of the pairwise tree.

#include "runtime/comm/sum/joined_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "runtime/comm/sum/pairwise_sum.h"
#include "sharding/layout/plan/sum_counter.h"
#include "tests/comm/reference.h"

namespace tessera {
namespace {

std::vector<float> random_floats(std::size_t numel, int seed) {
  const Bytes bytes = random_values(DType::kF32, numel, seed);
  std::vector<float> values(numel);
  std::memcpy(values.data(), bytes.data(), numel * sizeof(float));
  return values;
}

using Leaves = std::vector<std::vector<float>>;

/// Adds up the leaves of a run with a SumCounter, as Reducer does. Checks that no more sums wait than the counter says.
/// Returns the sums that are left.
Leaves counted_up(const Leaves& leaves, TreeBlock run) {
  const SumCounter counter(run, static_cast<std::int64_t>(leaves.size()));
  const std::size_t numel = leaves[0].size();
  Leaves waiting;
  for (std::int64_t round = 0; round < counter.rounds(); ++round) {
    const SumCounter::Turn turn = counter.turn(round);
    EXPECT_EQ(static_cast<int>(waiting.size()), turn.place + turn.joined);
    std::vector<const float*> joined;
    for (int i = turn.joined; i-- > 0;) joined.push_back(waiting[static_cast<std::size_t>(turn.place + i)].data());
    std::vector<float> sum(numel);
    joined_sum(joined, leaves[static_cast<std::size_t>(run.begin + round)].data(), sum.data(), numel);
    waiting.resize(static_cast<std::size_t>(turn.place));
    EXPECT_EQ(turn.is_last, round + 1 == run.numel());
    EXPECT_TRUE(turn.is_last || turn.place < counter.places()) << "a sum has no place";
    waiting.push_back(std::move(sum));
  }
  EXPECT_EQ(static_cast<int>(waiting.size()), counter.blocks());
  return waiting;
}

/// Returns the sum of all leaves.
std::vector<float> counted_up(const Leaves& leaves) {
  Leaves sums = counted_up(leaves, {0, static_cast<std::int64_t>(leaves.size())});
  EXPECT_EQ(sums.size(), 1U) << "a sum is left over";
  return std::move(sums[0]);
}

TEST(JoinedSum, CounterGivesThePairwiseTreeForAnyNumberOfLeaves) {
  constexpr std::size_t kNumel = 2500;
  for (int count = 1; count <= 40; ++count) {
    std::vector<std::vector<float>> leaves;
    std::vector<const void*> sources;
    for (int k = 0; k < count; ++k) leaves.push_back(random_floats(kNumel, 100 * count + k));
    for (const auto& leaf : leaves) sources.push_back(leaf.data());
    std::vector<float> expected(kNumel);
    pairwise_sum(sources, DType::kF32, expected.data(), kNumel);
    EXPECT_TRUE(same_bits(counted_up(leaves), expected)) << count << " leaves";
  }
}

// A rank's run of 2^k leaves is a subtree, so the tree over ranks continues from the sum of that subtree.
TEST(JoinedSum, RunsOfAPowerOfTwoGoOnInTheTreeOverRanks) {
  constexpr std::size_t kNumel = 300;
  for (const int ranks : {2, 3, 5, 6, 8}) {
    for (const int each : {1, 2, 4, 8}) {
      std::vector<std::vector<float>> leaves, sums;
      for (int k = 0; k < ranks * each; ++k) leaves.push_back(random_floats(kNumel, 31 * ranks + k));
      for (int rank = 0; rank < ranks; ++rank)
        sums.push_back(counted_up({leaves.begin() + rank * each, leaves.begin() + (rank + 1) * each}));
      std::vector<const void*> sources;
      for (const auto& sum : sums) sources.push_back(sum.data());
      std::vector<float> total(kNumel);
      pairwise_sum(sources, DType::kF32, total.data(), kNumel);
      EXPECT_TRUE(same_bits(total, counted_up(leaves))) << ranks << " ranks with " << each;
    }
  }
}

TEST(JoinedSum, WritesOverItsLastOrAnyThatWaits) {
  constexpr std::size_t kNumel = 1500;
  const std::vector<std::vector<float>> values = {random_floats(kNumel, 1), random_floats(kNumel, 2),
                                                  random_floats(kNumel, 3)};
  std::vector<float> expected(kNumel);
  joined_sum(std::vector<const float*>{values[1].data(), values[2].data()}, values[0].data(), expected.data(), kNumel);
  EXPECT_EQ(expected[7], (values[0][7] + values[1][7]) + values[2][7]);
  for (std::size_t place = 0; place < values.size(); ++place) {
    auto copy = values;
    joined_sum(std::vector<const float*>{copy[1].data(), copy[2].data()}, copy[0].data(), copy[place].data(), kNumel);
    EXPECT_TRUE(same_bits(copy[place], expected)) << "source " << place;
  }
}

TEST(SumCounterTest, KeepsAsManySumsAsTheLogarithmOfItsNumber) {
  EXPECT_EQ(SumCounter(1).places(), 0);
  EXPECT_EQ(SumCounter(2).places(), 1);
  EXPECT_EQ(SumCounter(4).places(), 2);
  EXPECT_EQ(SumCounter(5).places(), 2);
  EXPECT_EQ(SumCounter(8).places(), 3);
  EXPECT_EQ(SumCounter(1000000).places(), 19);
}

/// Returns the sum of a node of the tree over `leaves`, in the same order as pairwise_sum.
std::vector<float> sum_of(const Leaves& leaves, TreeBlock node) {
  std::vector<const void*> sources;
  for (std::int64_t i = node.begin; i < node.end; ++i) sources.push_back(leaves[static_cast<std::size_t>(i)].data());
  std::vector<float> sum(leaves[0].size());
  pairwise_sum(sources, DType::kF32, sum.data(), sum.size());
  return sum;
}

TEST(SumCounterTest, AnyRunLeavesTheSumsOfItsBlocks) {
  constexpr std::size_t kNumel = 40;
  for (const std::int64_t all : {1, 2, 7, 8, 12, 24, 37}) {
    Leaves leaves;
    for (std::int64_t k = 0; k < all; ++k) leaves.push_back(random_floats(kNumel, static_cast<int>(100 * all + k)));
    for (std::int64_t begin = 0; begin < all; ++begin) {
      for (std::int64_t end = begin + 1; end <= all; ++end) {
        const Leaves sums = counted_up(leaves, {begin, end});
        const std::vector<TreeBlock> blocks = blocks_of({begin, end}, all);
        ASSERT_EQ(sums.size(), blocks.size());
        EXPECT_LE(blocks.size(), static_cast<std::size_t>(2 * std::bit_width(static_cast<std::uint64_t>(all))));
        for (std::size_t i = 0; i < blocks.size(); ++i)
          EXPECT_TRUE(same_bits(sums[i], sum_of(leaves, blocks[i]))) << begin << " to " << end << " of " << all;
      }
    }
  }
}

TEST(SumCounterTest, NoRunHasMoreBlocksOrPlacesThanTheMostOfItsLength) {
  constexpr std::int64_t kMost = 40;
  std::vector<int> blocks(kMost + 1), places(kMost + 1);  // [length of a run]: largest number of blocks, and of places
  for (std::int64_t all = 1; all <= 3 * kMost; ++all) {
    for (std::int64_t begin = 0; begin < all; ++begin) {
      for (std::int64_t end = begin + 1; end <= std::min(all, begin + kMost); ++end) {
        const SumCounter counter({begin, end}, all);
        int& most = blocks[static_cast<std::size_t>(end - begin)];
        most = std::max(most, counter.blocks());
        int& most_waiting = places[static_cast<std::size_t>(end - begin)];
        most_waiting = std::max(most_waiting, counter.places());
      }
    }
  }
  for (std::size_t longest = 1; longest < blocks.size(); ++longest) {
    blocks[longest] = std::max(blocks[longest], blocks[longest - 1]);
    places[longest] = std::max(places[longest], places[longest - 1]);
    EXPECT_EQ(most_blocks(static_cast<std::int64_t>(longest)), blocks[longest]) << longest;
    EXPECT_EQ(most_places(static_cast<std::int64_t>(longest)), places[longest]) << longest;
  }
}

TEST(SumCounterTest, ABlockIsTheLargestNodeThatARunBeginsWith) {
  using Blocks = std::vector<TreeBlock>;
  EXPECT_EQ(blocks_of({0, 3}, 12), (Blocks{{0, 2}, {2, 3}}));
  EXPECT_EQ(blocks_of({3, 6}, 12), (Blocks{{3, 4}, {4, 6}}));
  EXPECT_EQ(blocks_of({1, 7}, 8), (Blocks{{1, 2}, {2, 4}, {4, 6}, {6, 7}}));
  EXPECT_EQ(blocks_of({8, 12}, 12), (Blocks{{8, 12}}));
  EXPECT_EQ(blocks_of({8, 13}, 13), (Blocks{{8, 13}})) << "the end of the leaves cuts this node off";
  EXPECT_EQ(blocks_of({0, 13}, 13), (Blocks{{0, 13}}));
}

}  // namespace
}  // namespace tessera
