// Tests the notes that ranks sum. The sum shows which parameters any rank used, and whether the ranks' digests are
// equal.

#include "sharding/gather/unit_notes.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <vector>

#include "sharding/layout/plan/memory_plan.h"
#include "sharding/memory_view.h"

namespace tessera::testing {
namespace {

using Digests = std::vector<std::uint64_t>;

/// Returns the sum of the notes that ranks with these digests write. Rank r uses parameter p if r == p.
std::vector<float> sum_of_notes(const Digests& digests, std::size_t parameters) {
  std::vector<float> sum(parameters + 64 + 5), notes(sum.size(), 7.0F);
  for (std::size_t rank = 0; rank < digests.size(); ++rank) {
    std::vector<char> used(parameters);
    for (std::size_t p = 0; p < parameters; ++p) used[p] = p == rank ? 1 : 0;
    unit_notes::write(notes, used, digests[rank], 0.5 * static_cast<double>(rank),
                      static_cast<std::int64_t>(100 + rank));
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += notes[i];
  }
  return sum;
}

TEST(UnitNotes, SumTellsWhichParametersAnyRankUsed) {
  std::vector<char> used(3, 2);
  unit_notes::read_used(sum_of_notes({0, 0}, 3), used);
  EXPECT_EQ(used, (std::vector<char>{1, 1, 0}));
}

TEST(UnitNotes, SumHoldsTheTotalWeight) {
  const std::vector<float> sum = sum_of_notes({7, 7, 7}, 3);
  EXPECT_EQ(sum[static_cast<std::size_t>(unit_notes::place_of_weight(3))], 1.5F);
  EXPECT_TRUE(unit_notes::have_one_digest(sum, 3, 3));
}

TEST(UnitNotes, SumHoldsTheSamplesOfAllRanks) {
  const std::vector<float> sum = sum_of_notes({7, 7, 7}, 3);
  EXPECT_EQ(sum[static_cast<std::size_t>(unit_notes::place_of_samples(3))], 303.0F);
}

TEST(UnitNotes, OneDifferingBitInADigestIsNoticed) {
  constexpr std::uint64_t kDigest = 0xF00DFACE12345678;
  const auto agree = [](const Digests& digests) {
    std::vector<float> sum = sum_of_notes(digests, 3);
    const auto ranks = static_cast<int>(digests.size());
    const bool do_they = unit_notes::have_one_digest(sum, 3, ranks);
    const at::Tensor bits = flat_view(sum.data() + 3, DType::kF32, MemoryPlan::kDigestBits, at::kCPU);
    unit_notes::compare_digests(bits, ranks);  // a GPU compares the digests with this function
    EXPECT_EQ(bits.eq(0).all().item<bool>(), do_they);
    EXPECT_LE(bits.max().item<float>(), 0.0F) << "sums of several could be 0";
    return do_they;
  };
  EXPECT_TRUE(agree({kDigest}));
  EXPECT_TRUE(agree({kDigest, kDigest, kDigest}));
  EXPECT_TRUE(agree({0, 0}));
  for (int bit = 0; bit < 64; ++bit) {
    EXPECT_FALSE(agree({kDigest, kDigest, kDigest ^ std::uint64_t{1} << bit})) << bit;
    EXPECT_FALSE(agree({kDigest, kDigest ^ std::uint64_t{1} << bit})) << bit;
  }
}

}  // namespace
}  // namespace tessera::testing
