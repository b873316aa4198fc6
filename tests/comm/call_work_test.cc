#include "runtime/comm/rounds/call_work.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

namespace tessera {
namespace {

constexpr std::size_t kBytes = 1 << 16;
constexpr double kElements = kBytes / 4.0;

CallWork halving(Operation operation, int ranks) {
  return work_of(operation, Algorithm::kHalving, ranks, DType::kF32, kBytes);
}
CallWork doubling(Operation operation, int ranks) {
  return work_of(operation, Algorithm::kDoubling, ranks, DType::kF32, kBytes);
}
double levels(int ranks) { return std::ceil(std::log2(ranks)); }

/// Returns the work of the root in an all-reduce by a binomial tree (docs/design/transports.md, "Why no binomial
/// tree").
CallWork tree(int ranks) {
  const double up = levels(ranks);
  return {2 * up, 2 * up, 2 * up * kBytes, up * kElements};
}

TEST(HalvingAllReduce, HasATreesRoundsButSendsAndAddsLess) {
  for (int ranks = 2; ranks <= 130; ++ranks) {
    const CallWork work = halving(Operation::kAllReduce, ranks);
    EXPECT_EQ(work.rounds, tree(ranks).rounds) << ranks;
    EXPECT_LT(work.bytes, tree(ranks).bytes) << ranks;
    EXPECT_LT(work.adds, tree(ranks).adds) << ranks;
    EXPECT_LE(work.bytes, 3.0 * kBytes) << ranks;
    EXPECT_LE(work.adds, kElements * 1.000001) << ranks;
    EXPECT_LE(work.messages, 2.0 * (ranks - 1)) << ranks;
    EXPECT_GE(work.messages, tree(ranks).messages) << ranks;
  }
}

TEST(HalvingAllReduce, SavesThePagesFormulaAtPowersOfTwo) {
  for (const int ranks : {2, 4, 8, 16, 32, 64, 128}) {
    const CallWork work = halving(Operation::kAllReduce, ranks);
    const double less = levels(ranks) - 1 + 1.0 / ranks;
    EXPECT_EQ(work.messages, tree(ranks).messages) << ranks;
    EXPECT_NEAR(tree(ranks).bytes - work.bytes, 2 * less * kBytes, 1e-6) << ranks;
    EXPECT_NEAR(tree(ranks).adds - work.adds, less * kElements, 1e-6) << ranks;
  }
}

TEST(HalvingAllReduce, SendsMoreMessagesThanATreeJustAboveAPowerOfTwo) {
  for (const int ranks : {9, 17, 33}) {
    const CallWork work = halving(Operation::kAllReduce, ranks);
    EXPECT_EQ(work.messages, 2.0 * (ranks - 1)) << ranks;
    EXPECT_NEAR(work.bytes, 2.0 * kBytes, 1e-6) << ranks;
    EXPECT_NEAR(work.adds, kElements, 1e-6) << ranks;
  }
}

TEST(Doubling, TakesHalfTheRoundsOfATreeAndFewerMessages) {
  for (int ranks = 2; ranks <= 130; ++ranks) {
    for (const Operation operation : {Operation::kAllReduce, Operation::kAllGather}) {
      const CallWork work = doubling(operation, ranks);
      EXPECT_EQ(work.rounds, levels(ranks)) << ranks;
      EXPECT_LE(work.messages, 2 * levels(ranks) - 1) << ranks;
      EXPECT_NEAR(work.bytes, (ranks - 1.0) * kBytes, 1e-6) << ranks;
    }
  }
}

TEST(HalvingReduceScatter, TakesAtMostOneRoundMoreThanATreeAndSendsLess) {
  for (int ranks = 2; ranks <= 130; ++ranks) {
    const CallWork work = halving(Operation::kReduceScatter, ranks);
    const bool is_power = std::has_single_bit(static_cast<unsigned>(ranks));
    EXPECT_EQ(work.rounds, levels(ranks) + (is_power ? 0 : 1)) << ranks;
    EXPECT_LT(work.bytes, 2.0 * kBytes) << ranks;
  }
}

}  // namespace
}  // namespace tessera
