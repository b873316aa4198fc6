// Tests the permutation that shuffles samples: it is a bijection, it is uniform, and it never changes.

#include "runtime/data/permutation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

namespace tessera {
namespace {

using ::testing::ElementsAre;

std::vector<std::uint64_t> all_of(const Permutation& permutation) {
  std::vector<std::uint64_t> result;
  for (std::uint64_t i = 0; i < permutation.size(); ++i) result.push_back(permutation(i));
  return result;
}

/// Returns the difference of chi-square and its mean, in standard deviations, for counts that should all be equal.
double excess(const std::vector<double>& counts) {
  double total = 0, chi = 0;
  for (const double count : counts) total += count;
  const double expected = total / static_cast<double>(counts.size());
  for (const double count : counts) chi += (count - expected) * (count - expected) / expected;
  const double freedom = static_cast<double>(counts.size()) - 1;
  return (chi - freedom) / std::sqrt(2 * freedom);
}

TEST(Permutation, IsABijection) {
  for (std::uint64_t n = 1; n <= 600; ++n) {
    for (std::uint64_t seed = 0; seed < 3; ++seed) {
      std::vector<bool> seen(n);
      for (const std::uint64_t value : all_of({n, seed, n})) {
        ASSERT_LT(value, n);
        ASSERT_FALSE(seen[value]);
        seen[value] = true;
      }
    }
  }
}

TEST(Permutation, OtherSeedOrStreamGivesAnotherOrder) {
  const auto base = all_of({1000, 1, 1});
  EXPECT_EQ(base, all_of({1000, 1, 1}));
  for (const auto& other : {all_of({1000, 2, 1}), all_of({1000, 1, 2}), all_of({1000, 2, 2}), all_of({1000, 0, 0})}) {
    int same = 0;
    for (std::size_t i = 0; i < base.size(); ++i) same += base[i] == other[i];
    EXPECT_LT(same, 10);  // about one element is expected to stay in its place
  }
}

/// The documented algorithm must never change: another order would break every run that is resumed. The numbers come
/// from a second implementation, which was written from the header's description.
TEST(Permutation, OrdersAreTheStoredOnesOfTheDocumentedAlgorithm) {
  EXPECT_THAT(all_of({10, 42, 0}), ElementsAre(9, 8, 7, 5, 2, 3, 4, 1, 6, 0));
  const Permutation large(std::uint64_t{1} << 40, 42, 7);
  EXPECT_THAT((std::vector{large(0), large(1), large(2)}), ElementsAre(1004899996949, 12391034717, 553234217142));
  const Permutation odd(1'000'003, ~std::uint64_t{0}, 123'456'789);
  EXPECT_THAT((std::vector{odd(0), odd(1), odd(1'000'002)}), ElementsAre(655698, 618531, 877944));
}

TEST(Permutation, EveryOrderOfFewElementsIsEquallyOften) {
  for (const std::uint64_t n : {2, 3, 4, 5}) {
    std::map<std::vector<std::uint64_t>, double> count;
    double factorial = 1;
    for (std::uint64_t i = 2; i <= n; ++i) factorial *= static_cast<double>(i);
    for (std::uint64_t epoch = 0; epoch < 24'000; ++epoch) ++count[all_of({n, 5, epoch})];
    ASSERT_EQ(static_cast<double>(count.size()), factorial);
    std::vector<double> counts;
    for (const auto& [order, times] : count) counts.push_back(times);
    EXPECT_LT(std::abs(excess(counts)), 4) << n;
  }
}

/// Each element gets to each place equally often, over epochs and over seeds.
TEST(Permutation, EachElementLandsAtEachPlaceEquallyOften) {
  for (const std::uint64_t n : {16, 100, 257}) {
    for (const bool over_seeds : {false, true}) {
      std::vector<double> counts(n * n);
      for (std::uint64_t k = 0; k < 4000; ++k) {
        const auto order = all_of({n, over_seeds ? k : 9, over_seeds ? 9 : k});
        for (std::uint64_t i = 0; i < n; ++i) ++counts[i * n + order[i]];
      }
      EXPECT_LT(std::abs(excess(counts)), 4) << n;
    }
  }
}

/// No trace of the data's order stays: neighbours do not stay neighbours, and places before and after the shuffle are
/// not correlated.
TEST(Permutation, NeighboursAndPlacesAreUncorrelated) {
  constexpr std::uint64_t n = 100'000;
  const auto order = all_of({n, 3, 0});
  double neighbours = 0, sum = 0;
  const double mean = (n - 1) / 2.0;
  for (std::uint64_t i = 0; i < n; ++i) {
    if (i > 0) neighbours += std::abs(static_cast<double>(order[i]) - static_cast<double>(order[i - 1])) == 1;
    sum += (static_cast<double>(i) - mean) * (static_cast<double>(order[i]) - mean);
  }
  EXPECT_LT(neighbours, 12);  // two are expected by chance
  EXPECT_LT(std::abs(sum / (n * (n * static_cast<double>(n) - 1) / 12)), 4 / std::sqrt(n));
}

}  // namespace
}  // namespace tessera
