// Tests the helper that chooses a pairwise sample from a grid of test cases.

#include "tests/support/pairwise.h"

#include <gtest/gtest.h>

#include <array>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace tessera::testing {
namespace {

/// A pair of dimensions, and a value in each of them.
using Pair = std::array<std::size_t, 4>;

std::set<Pair> pairs_of(const std::vector<GridPoint>& points) {
  std::set<Pair> pairs;
  for (const GridPoint& point : points) {
    for (std::size_t a = 0; a < point.size(); ++a) {
      for (std::size_t b = a; b < point.size(); ++b) pairs.insert({a, b, point[a], point[b]});
    }
  }
  return pairs;
}

TEST(Pairwise, EveryPairOfValuesIsInSomePoint) {
  for (const std::vector<std::size_t>& sizes :
       {std::vector<std::size_t>{}, {4}, {3, 5}, {2, 2, 2}, {5, 3, 2}, {6, 3, 3, 10}, {2, 3, 2, 3, 2}}) {
    const std::vector<GridPoint> all = grid_product(sizes), sample = pairwise_sample(sizes);
    EXPECT_EQ(pairs_of(sample), pairs_of(all));
    EXPECT_EQ(std::set(sample.begin(), sample.end()).size(), sample.size()) << "no point comes twice";
  }
}

TEST(Pairwise, IsMuchShorterThanTheProduct) {
  // The smallest possible number of cases is the product of the two largest dimensions.
  EXPECT_LE(pairwise_sample({5, 3, 2}).size(), 5U * 3 + 1);
  EXPECT_LE(pairwise_sample({6, 3, 3, 10}).size(), 6U * 10 + 6);
  EXPECT_LE(pairwise_sample({3, 3, 3, 3}).size(), 81U / 5);
  EXPECT_LE(pairwise_sample({2, 2, 2, 2, 2, 2}).size(), 64U / 6);
}

TEST(Pairwise, TwoDimensionsGiveTheWholeProduct) { EXPECT_EQ(pairwise_sample({3, 5}), grid_product({3, 5})); }

TEST(Pairwise, PairsOfTheFirstDimensionsAloneLeaveTheOthersToTakeTurns) {
  const std::vector<std::size_t> sizes = {4, 3, 2, 5};
  const std::vector<GridPoint> sample = pairwise_sample(sizes, nullptr, 2);
  EXPECT_EQ(sample.size(), 12U);
  std::set<Pair> first;
  std::vector<int> fourth(5);
  for (const GridPoint& point : sample) {
    first.insert({0, 1, point[0], point[1]});
    ++fourth[point[3]];
  }
  EXPECT_EQ(first.size(), 12U);
  for (const int times : fourth) EXPECT_GE(times, 2);
  EXPECT_EQ(pairwise_sample(sizes, nullptr, 1).size(), 5U) << "each value once";
  EXPECT_EQ(pairwise_sample(sizes, nullptr, 4), pairwise_sample(sizes));
}

TEST(Pairwise, FilteredPointsAreNotSampled) {
  const GridFilter exists = [](const GridPoint& point) { return point[0] != 1 || point[2] == 0; };
  const std::vector<std::size_t> sizes = {3, 4, 3};
  const std::vector<GridPoint> sample = pairwise_sample(sizes, exists);
  EXPECT_EQ(pairs_of(sample), pairs_of(grid_product(sizes, exists)));
  for (const GridPoint& point : sample) EXPECT_TRUE(exists(point));
}

TEST(Pairwise, GivesValuesInTheOrderOfNestedLoops) {
  const std::string names[] = {"a", "b"};
  const auto of =
      pairwise_where([](const std::string& name, int n) { return name == "a" || n == 2; }, names, std::array{1, 2});
  const std::vector<std::tuple<std::string, int>> wanted = {{"a", 1}, {"a", 2}, {"b", 2}};
  EXPECT_EQ(of, wanted);
}

TEST(MadeOnce, SameNameIsMadeOnlyOnce) {
  MadeOnce<int> made;
  int calls = 0;
  for (const char* const name : {"a", "b", "a"}) made(name, [&] { return ++calls; });
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(made("a", [] { return 0; }), 1);
}

TEST(Pairwise, LongTestsRunTheWholeProduct) {
  const std::vector<std::size_t> sizes = {3, 3, 3};
  EXPECT_EQ(pairwise(sizes), tests_are_long() ? grid_product(sizes) : pairwise_sample(sizes));
  EXPECT_EQ(grid_product(sizes).size(), 27U);
}

}  // namespace
}  // namespace tessera::testing
