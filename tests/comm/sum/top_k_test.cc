// Tests the selection of the elements with the largest magnitudes.

#include "runtime/comm/sum/top_k.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace tessera {
namespace {

using Indices = std::vector<std::uint32_t>;

Indices selected(const std::vector<float>& values, std::size_t count) {
  Indices indices(count + 1, 0xabcdu);
  select_largest(values.data(), values.size(), count, indices.data());
  EXPECT_EQ(indices.back(), 0xabcdu) << "select_largest wrote beyond count";
  indices.pop_back();
  return indices;
}

Indices selected_slowly(const std::vector<float>& values, std::size_t count) {
  Indices order(values.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::stable_sort(order, std::ranges::greater(), [&](std::uint32_t i) { return std::fabs(values[i]); });
  order.resize(count);
  std::ranges::sort(order);
  return order;
}

TEST(SelectLargest, SelectsWhatSortingSelects) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (const std::size_t numel : {1, 2, 3, 100, 4097}) {
    std::vector<float> fine(numel), coarse(numel), few(numel, 0.0f), close(numel);
    for (std::size_t i = 0; i < numel; ++i) {
      fine[i] = normal(generator) * std::pow(10.0f, normal(generator));
      coarse[i] = std::round(normal(generator));  // most values occur several times
      if (i % 7 == 0) few[i] = -1e-42f;           // most values are zeros
      close[i] = std::nextafter(1.0f, i % 3 == 0 ? 2.0f : i % 3 == 1 ? 0.0f : 1.0f);
    }
    for (const auto& values : {fine, coarse, few, close}) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, numel / 100, numel / 2, numel - 1, numel})
        ASSERT_EQ(selected(values, count), selected_slowly(values, count)) << count << " of " << numel;
    }
  }
}

TEST(SelectLargest, NonFiniteValuesComeFirst) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> values = {1e38f, nan, 3.0f, -infinity, -3e38f};
  EXPECT_THAT(selected(values, 1), ::testing::ElementsAre(1u));
  EXPECT_THAT(selected(values, 2), ::testing::ElementsAre(1u, 3u));
  EXPECT_THAT(selected(values, 3), ::testing::ElementsAre(1u, 3u, 4u));
}

}  // namespace
}  // namespace tessera
