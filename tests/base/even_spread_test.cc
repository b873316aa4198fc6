// Tests how a share of the elements is chosen evenly among all of them.

#include "runtime/base/even_spread.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace tessera {
namespace {

/// Returns the number of chosen elements among the `numel` elements that begin with element `begin`.
std::int64_t chosen_in(const EvenSpread& spread, std::int64_t begin, std::int64_t numel) {
  std::int64_t chosen = 0;
  for (std::int64_t i = begin; i < begin + numel; ++i) chosen += spread.has(i) ? 1 : 0;
  return chosen;
}

template <class Body>
void for_all_spreads(const Body& body) {
  for (std::int64_t all = 0; all <= 20; ++all) {
    for (std::int64_t chosen = 0; chosen <= all; ++chosen) {
      for (std::int64_t first = 0; first <= all; ++first) body(all, chosen, first);
    }
  }
}

TEST(EvenSpread, ChoosesExactlyTheCountAndFillsTheFirstPartFirst) {
  for_all_spreads([](std::int64_t all, std::int64_t chosen, std::int64_t first) {
    const EvenSpread spread(all, chosen, first);
    EXPECT_EQ(chosen_in(spread, 0, all), chosen);
    EXPECT_EQ(chosen_in(spread, 0, first), std::min(chosen, first));
    for (std::int64_t i = 0; i <= all; ++i) EXPECT_EQ(spread.chosen_before(i), chosen_in(spread, 0, i));
  });
}

TEST(EvenSpread, ChosenAndOthersAreNumberedInOrder) {
  for_all_spreads([](std::int64_t all, std::int64_t chosen, std::int64_t first) {
    const EvenSpread spread(all, chosen, first);
    std::int64_t next[2] = {0, 0};
    for (std::int64_t i = 0; i < all; ++i) EXPECT_EQ(spread.index(i), next[spread.has(i) ? 1 : 0]++) << i;
  });
}

// A run lies within the first `first` elements, or within the other elements. It has its share of the chosen elements
// of this part, with an error of less than one element.
TEST(EvenSpread, EveryRunHasItsShareUpToOneElement) {
  for_all_spreads([](std::int64_t all, std::int64_t chosen, std::int64_t first) {
    const EvenSpread spread(all, chosen, first);
    const struct {
      std::int64_t begin, end, chosen;
    } parts[] = {{0, first, std::min(chosen, first)}, {first, all, std::max<std::int64_t>(chosen - first, 0)}};
    for (const auto& part : parts) {
      for (std::int64_t begin = part.begin; begin < part.end; ++begin) {
        for (std::int64_t numel = 1; begin + numel <= part.end; ++numel) {
          const double share = static_cast<double>(numel * part.chosen) / static_cast<double>(part.end - part.begin);
          EXPECT_LT(std::abs(static_cast<double>(chosen_in(spread, begin, numel)) - share), 1.0)
              << chosen << " of " << all << ", " << first << " first: " << numel << " from " << begin;
        }
      }
    }
  });
}

TEST(EvenSpread, DefaultChoosesNothing) {
  const EvenSpread none;
  EXPECT_FALSE(none.has(0));
  EXPECT_EQ(none.index(3), 3);
}

}  // namespace
}  // namespace tessera
