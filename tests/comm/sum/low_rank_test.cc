// Tests the matrix products and the orthonormal columns of low-rank compression (PowerSGD).

#include "runtime/comm/sum/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/random_numbers.h"

namespace tessera {
namespace {

using testing::random_numbers;
using Numbers = std::vector<float>;

void expect_near(const Numbers& got, const std::vector<double>& wanted, double tolerance) {
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], wanted[i], tolerance) << "element " << i;
}

double dot(const float* a, const float* b, std::size_t numel) {
  double sum = 0;
  for (std::size_t i = 0; i < numel; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

TEST(LowRank, ProductsEqualMatrixProducts) {
  for (const LowRankShape shape : {LowRankShape{1, 1, 1}, {3, 5, 1}, {17, 16, 4}, {20, 33, 5}, {40, 100, 11}}) {
    const auto [rows, columns, rank] = shape;
    const Numbers matrix = random_numbers(rows * columns, 1), before = random_numbers(rows * columns, 2),
                  right = random_numbers(rank * columns, 3);
    Numbers kept = before, left(rank * rows);
    add_and_project(matrix.data(), kept.data(), right.data(), left.data(), shape);
    std::vector<double> sum(rows * columns), projected(rank * rows), back(rank * columns), product(rows * columns),
        rest(rows * columns);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = matrix[i] + before[i];
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < columns; ++j)
        for (std::size_t k = 0; k < rank; ++k) {
          projected[k * rows + i] += sum[i * columns + j] * right[k * columns + j];
          back[k * columns + j] += sum[i * columns + j] * left[k * rows + i];
          product[i * columns + j] += static_cast<double>(left[k * rows + i]) * right[k * columns + j];
        }
    expect_near(kept, sum, 1e-6);
    expect_near(left, projected, 1e-4);
    Numbers got(rank * columns, 7.0f), expanded(rows * columns, 7.0f);
    project_back(kept.data(), left.data(), got.data(), shape);
    expect_near(got, back, 1e-3);
    expand(left.data(), right.data(), 0.25f, expanded.data(), kept.data(), shape);
    expect_near(expanded, product, 1e-3);
    for (std::size_t i = 0; i < rest.size(); ++i) rest[i] = sum[i] - 0.25 * product[i];
    expect_near(kept, rest, 1e-3);
  }
}

TEST(LowRank, ColumnsBecomeOrthonormal) {
  constexpr std::size_t kRank = 5, kNumel = 133;
  Numbers factor = random_numbers(kRank * kNumel, 4);
  for (std::size_t i = 0; i < kNumel; ++i) {
    factor[1 * kNumel + i] = factor[i] + 1e-4f * factor[1 * kNumel + i];  // this column nearly equals the first one
    // this column is a combination of other columns, apart from rounding
    factor[3 * kNumel + i] = 2 * factor[i] - 0.5f * factor[2 * kNumel + i];
    factor[4 * kNumel + i] = 1e-18f * factor[4 * kNumel + i];  // this column is very short
  }
  orthonormalize(factor.data(), kRank, kNumel);
  for (std::size_t a = 0; a < kRank; ++a) {
    for (std::size_t b = 0; b < kRank; ++b)
      EXPECT_NEAR(dot(&factor[a * kNumel], &factor[b * kNumel], kNumel), a == b ? 1 : 0, 1e-6) << a << " " << b;
  }
}

TEST(LowRank, EmptyColumnsBecomeZerosAndAreDrawnAgain) {
  constexpr std::size_t kRank = 3, kNumel = 40;
  Numbers factor(kRank * kNumel);
  for (std::size_t i = 0; i < kNumel; ++i) factor[i] = factor[2 * kNumel + i] = static_cast<float>(i % 4) - 1;
  orthonormalize(factor.data(), kRank, kNumel);
  EXPECT_NEAR(dot(&factor[0], &factor[0], kNumel), 1, 1e-6);
  for (std::size_t i = kNumel; i < factor.size(); ++i) ASSERT_EQ(factor[i], 0.0f) << i;
  const Numbers before = factor;
  draw_missing(7, factor.data(), kRank, kNumel);
  for (std::size_t i = 0; i < kNumel; ++i) ASSERT_EQ(factor[i], before[i]) << i;
  Numbers again(kRank * kNumel), other(kRank * kNumel);
  draw_missing(7, again.data(), kRank, kNumel);
  draw_missing(8, other.data(), kRank, kNumel);
  for (std::size_t i = kNumel; i < factor.size(); ++i) {
    ASSERT_EQ(factor[i], again[i]) << i;
    ASSERT_NE(factor[i], other[i]) << i;
    ASSERT_LE(std::fabs(factor[i]), 1.0f) << i;
  }
  EXPECT_LT(std::fabs(dot(&again[0], &again[kNumel], kNumel)), 0.8 * dot(&again[0], &again[0], kNumel));
}

// A step whose gradients are not finite is skipped. The sum must therefore have a value that is not finite.
TEST(LowRank, NonFiniteGradientShowsInTheSum) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    const LowRankShape shape{6, 20, 2};
    Numbers matrix = random_numbers(120, 5), kept(120), right = random_numbers(40, 6), left(12);
    matrix[47] = bad;
    add_and_project(matrix.data(), kept.data(), right.data(), left.data(), shape);
    orthonormalize(left.data(), 2, 6);
    project_back(kept.data(), left.data(), right.data(), shape);
    expand(left.data(), right.data(), 1.0f, matrix.data(), kept.data(), shape);
    bool all_finite = true;
    for (const float value : matrix) all_finite &= std::isfinite(value);
    EXPECT_FALSE(all_finite) << bad;
  }
}

}  // namespace
}  // namespace tessera
