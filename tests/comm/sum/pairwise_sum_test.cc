// Tests the pairwise sum over sources. Its bits are those of one fixed tree.

#include "runtime/comm/sum/pairwise_sum.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>

#include "tests/comm/reference.h"

namespace tessera {
namespace {

struct Case {
  DType dtype;
  int sources;
  std::size_t numel;
};

class PairwiseSum : public ::testing::TestWithParam<DType> {};

TEST_P(PairwiseSum, EqualsTheTreeForAnyNumberOfSources) {
  const DType dtype = GetParam();
  for (int count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 33})
    for (std::size_t numel : {0, 1, 3, 16, 17, 255, 1025, 5000}) {
      std::vector<Bytes> inputs;
      for (int k = 0; k < count; ++k) inputs.push_back(random_values(dtype, numel, 100 * count + k));
      const std::vector<float> expected = reference_sum(inputs, dtype, 0, numel);
      std::vector<const void*> sources;
      for (const auto& input : inputs) sources.push_back(input.data());
      std::vector<float> sum(numel);
      pairwise_sum(sources, dtype, sum.data(), numel);
      ASSERT_TRUE(same_bits(sum, expected)) << count << " sources of " << numel;
    }
}

TEST_P(PairwiseSum, CutsDoNotChangeTheBits) {
  const DType dtype = GetParam();
  constexpr std::size_t kNumel = 517;
  std::vector<Bytes> inputs;
  for (int k = 0; k < 6; ++k) inputs.push_back(random_values(dtype, kNumel, k));
  const std::vector<float> expected = reference_sum(inputs, dtype, 0, kNumel);
  for (std::size_t cut : {1, 7, 16, 33, 256, 516}) {
    std::vector<float> sum(kNumel);
    for (auto [begin, end] : {std::pair<std::size_t, std::size_t>(0, cut), {cut, kNumel}}) {
      std::vector<const void*> sources;
      for (const auto& input : inputs) sources.push_back(input.data() + begin * size_of(dtype));
      pairwise_sum(sources, dtype, sum.data() + begin, end - begin);
    }
    ASSERT_TRUE(same_bits(sum, expected)) << "cut at " << cut;
  }
}

INSTANTIATE_TEST_SUITE_P(Types, PairwiseSum, ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(PairwiseSumTest, OutputMayBeAnySource) {
  constexpr std::size_t kNumel = 3000;
  for (int count : {2, 5, 8, 13})
    for (int in_place = 0; in_place < count; ++in_place) {
      std::vector<Bytes> inputs;
      for (int k = 0; k < count; ++k) inputs.push_back(random_values(DType::kF32, kNumel, k));
      const auto expected = reference_sum(inputs, DType::kF32, 0, kNumel);
      std::vector<const void*> sources;
      for (auto& input : inputs) sources.push_back(input.data());
      auto* output = reinterpret_cast<float*>(inputs[in_place].data());
      pairwise_sum(sources, DType::kF32, output, kNumel);
      ASSERT_EQ(std::memcmp(output, expected.data(), kNumel * sizeof(float)), 0) << count << " " << in_place;
    }
}

TEST(PairwiseSumTest, WidensEveryHalfPrecisionValueExactly) {
  std::vector<std::uint16_t> all(1 << 16);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  const std::vector<const void*> sources = {all.data()};
  std::vector<float> wide(all.size());
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    pairwise_sum(sources, dtype, wide.data(), wide.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      const float expected = widen_slowly(dtype, all[i]);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(wide[i])) << name_of(dtype) << " " << i;
      } else {
        ASSERT_EQ(wide[i], expected) << name_of(dtype) << " " << i;
        ASSERT_EQ(std::signbit(wide[i]), std::signbit(expected)) << name_of(dtype) << " " << i;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
