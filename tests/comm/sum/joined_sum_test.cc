// Tests that sums which come one after the other are added in the order of the pairwise tree.

#include "runtime/comm/sum/joined_sum.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
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

/// Adds up `leaves` by a SumCounter, as Reducer does, and checks that no more sums wait than it says.
std::vector<float> counted_up(const std::vector<std::vector<float>>& leaves) {
  const SumCounter counter(static_cast<std::int64_t>(leaves.size()));
  const std::size_t numel = leaves[0].size();
  std::vector<std::vector<float>> levels(static_cast<std::size_t>(counter.levels()), std::vector<float>(numel));
  std::uint64_t waits = 0;
  for (std::size_t round = 0; round < leaves.size(); ++round) {
    const auto number = static_cast<std::int64_t>(round);
    const std::uint64_t joined = counter.joined(number);
    EXPECT_EQ(joined & ~waits, 0U) << "a level joins that has no sum";
    std::vector<const float*> waiting;
    for (std::uint64_t left = joined; left != 0; left &= left - 1)
      waiting.push_back(levels[static_cast<std::size_t>(std::countr_zero(left))].data());
    waits &= ~joined;
    if (counter.is_last(number)) {
      EXPECT_EQ(waits, 0U) << "a sum is left over";
      std::vector<float> total(numel);
      joined_sum(waiting, leaves[round].data(), total.data(), numel);
      return total;
    }
    const int place = counter.place(number);
    EXPECT_EQ(waits >> place & 1, 0U) << "a sum would be written over";
    waits |= std::uint64_t{1} << place;
    joined_sum(waiting, leaves[round].data(), levels[static_cast<std::size_t>(place)].data(), numel);
  }
  return {};
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

// A rank's run of 2^k leaves is a subtree, so the tree over ranks goes on from its sum.
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

TEST(SumCounterTest, KeepsAsManySumsAsItsNumberHasDigits) {
  EXPECT_EQ(SumCounter(1).levels(), 0);
  EXPECT_EQ(SumCounter(2).levels(), 1);
  EXPECT_EQ(SumCounter(4).levels(), 2);
  EXPECT_EQ(SumCounter(5).levels(), 3);
  EXPECT_EQ(SumCounter(8).levels(), 3);
  EXPECT_EQ(SumCounter(1000000).levels(), SumCounter::kMostLevels);
}

}  // namespace
}  // namespace tessera
