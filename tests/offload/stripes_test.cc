// Tests how records are divided among several files by weight.

#include "offload/stripes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

namespace tessera {
namespace {

// Each file has its share of every prefix of the records. Each place in a file is used once.
TEST(Stripes, EveryPrefixIsSharedByWeight) {
  for (const std::vector<double>& weights :
       {std::vector<double>{1}, {1, 1}, {3.5, 1}, {0.1, 7, 2}, {1, 1, 1, 1, 1, 5}}) {
    std::vector<StripePlace> places(500);
    place_in_stripes(weights, places);
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    std::vector<std::int64_t> placed(weights.size());
    for (std::size_t r = 0; r < places.size(); ++r) {
      ASSERT_EQ(places[r].index, placed[static_cast<std::size_t>(places[r].file)]++);
      for (std::size_t f = 0; f < weights.size(); ++f) {
        const double share = weights[f] / sum * static_cast<double>(r + 1);
        EXPECT_LT(std::abs(static_cast<double>(placed[f]) - share), static_cast<double>(weights.size()));
      }
    }
  }
}

TEST(Stripes, EqualWeightsAlternate) {
  const double weights[] = {2, 2};
  StripePlace places[4];
  place_in_stripes(weights, places);
  for (std::int32_t r = 0; r < 4; ++r) EXPECT_EQ(places[r].file, r % 2);
}

}  // namespace
}  // namespace tessera
