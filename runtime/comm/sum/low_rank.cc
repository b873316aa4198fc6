#include "runtime/comm/sum/low_rank.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "runtime/comm/sum/cpu_clones.h"

namespace tessera {
namespace {

/// Number of partial sums in the sum over a row. They are added up at the end.
constexpr std::size_t kLanes = 16;
/// Number of columns of a factor that one loop over a row uses.
constexpr std::size_t kTogether = 4;

using Lanes [[gnu::vector_size(kLanes * sizeof(float)), gnu::aligned(4), gnu::may_alias]] = float;

TESSERA_INLINE float sum_of(const Lanes& lanes) {
  std::array<float, kLanes> parts;
  std::memcpy(parts.data(), &lanes, sizeof lanes);
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t i = 0; i < half; ++i) parts[i] += parts[i + half];
  }
  return parts[0];
}

/// Computes products of `row` with `Count` columns of `right`.
template <std::size_t Count>
TESSERA_INLINE void dot(const float* row, const float* right, std::size_t columns, float* products,
                        std::size_t stride) {
  Lanes sums[Count] = {};
  std::size_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    const Lanes values = *reinterpret_cast<const Lanes*>(row + j);
    for (std::size_t k = 0; k < Count; ++k)
      sums[k] += values * *reinterpret_cast<const Lanes*>(right + k * columns + j);
  }
  for (std::size_t k = 0; k < Count; ++k) {
    float product = sum_of(sums[k]);
    for (std::size_t i = j; i < columns; ++i) product += row[i] * right[k * columns + i];
    products[k * stride] = product;
  }
}

/// Adds a multiple of `row` to each of `Count` columns of `right`. `left` has the factor for each column.
template <std::size_t Count>
TESSERA_INLINE void add_row(const float* row, const float* left, std::size_t stride, float* right,
                            std::size_t columns) {
  std::array<float, Count> factors;
  for (std::size_t k = 0; k < Count; ++k) factors[k] = left[k * stride];
  std::size_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    const Lanes values = *reinterpret_cast<const Lanes*>(row + j);
    for (std::size_t k = 0; k < Count; ++k) *reinterpret_cast<Lanes*>(right + k * columns + j) += values * factors[k];
  }
  for (; j < columns; ++j) {
    for (std::size_t k = 0; k < Count; ++k) right[k * columns + j] += row[j] * factors[k];
  }
}

/// Sums `Count` columns of `right`, each multiplied by its own number of `left`. Sets `row` to this sum or, if `adds`,
/// adds the sum to `row`.
template <std::size_t Count>
TESSERA_INLINE void combine(const float* left, std::size_t stride, const float* right, std::size_t columns, bool adds,
                            float* row) {
  std::array<float, Count> factors;
  for (std::size_t k = 0; k < Count; ++k) factors[k] = left[k * stride];
  std::size_t j = 0;
  for (; j + kLanes <= columns; j += kLanes) {
    Lanes sum = adds ? *reinterpret_cast<const Lanes*>(row + j) : Lanes{};
    for (std::size_t k = 0; k < Count; ++k)
      sum += *reinterpret_cast<const Lanes*>(right + k * columns + j) * factors[k];
    *reinterpret_cast<Lanes*>(row + j) = sum;
  }
  for (; j < columns; ++j) {
    float sum = adds ? row[j] : 0.0f;
    for (std::size_t k = 0; k < Count; ++k) sum += right[k * columns + j] * factors[k];
    row[j] = sum;
  }
}

TESSERA_INLINE double product_of(const float* a, const float* b, std::size_t numel) {
  std::array<double, kLanes> sums{};
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::size_t l = 0; l < kLanes; ++l) sums[l] += static_cast<double>(a[i + l]) * static_cast<double>(b[i + l]);
  }
  for (; i < numel; ++i) sums[0] += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

TESSERA_CPU_CLONES double product(const float* a, const float* b, std::size_t numel) { return product_of(a, b, numel); }

TESSERA_CPU_CLONES void take_away(double times, const float* other, float* column, std::size_t numel) {
  for (std::size_t i = 0; i < numel; ++i)
    column[i] = static_cast<float>(static_cast<double>(column[i]) - times * static_cast<double>(other[i]));
}

/// Returns `z` as mixed by SplitMix64's finaliser.
std::uint64_t mixed(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

TESSERA_CPU_CLONES void add_and_project(const float* matrix, float* kept, const float* right, float* left,
                                        const LowRankShape& shape) {
  const auto [rows, columns, rank] = shape;
  for (std::size_t i = 0; i < rows; ++i) {
    float* const row = kept + i * columns;
    for (std::size_t j = 0; j < columns; ++j) row[j] += matrix[i * columns + j];
    std::size_t k = 0;
    for (; k + kTogether <= rank; k += kTogether)
      dot<kTogether>(row, right + k * columns, columns, left + k * rows + i, rows);
    for (; k < rank; ++k) dot<1>(row, right + k * columns, columns, left + k * rows + i, rows);
  }
}

TESSERA_CPU_CLONES void project_back(const float* matrix, const float* left, float* right, const LowRankShape& shape) {
  const auto [rows, columns, rank] = shape;
  std::fill_n(right, rank * columns, 0.0f);
  for (std::size_t i = 0; i < rows; ++i) {
    const float* const row = matrix + i * columns;
    std::size_t k = 0;
    for (; k + kTogether <= rank; k += kTogether)
      add_row<kTogether>(row, left + k * rows + i, rows, right + k * columns, columns);
    for (; k < rank; ++k) add_row<1>(row, left + k * rows + i, rows, right + k * columns, columns);
  }
}

TESSERA_CPU_CLONES void expand(const float* left, const float* right, float share, float* matrix, float* kept,
                               const LowRankShape& shape) {
  const auto [rows, columns, rank] = shape;
  for (std::size_t i = 0; i < rows; ++i) {
    float* const row = matrix + i * columns;
    std::size_t k = 0;
    for (; k + kTogether <= rank; k += kTogether)
      combine<kTogether>(left + k * rows + i, rows, right + k * columns, columns, k > 0, row);
    for (; k < rank; ++k) combine<1>(left + k * rows + i, rows, right + k * columns, columns, k > 0, row);
    for (std::size_t j = 0; j < columns; ++j) kept[i * columns + j] -= row[j] * share;
  }
}

void orthonormalize(float* factor, std::size_t rank, std::size_t numel) {
  constexpr double kNothing = 1e-12;  // share of a column's length that counts as nothing
  for (std::size_t k = 0; k < rank; ++k) {
    float* const column = factor + k * numel;
    const double before = std::sqrt(product(column, column, numel));
    for (int times = 0; times < 2; ++times) {
      for (std::size_t other = 0; other < k; ++other) {
        const float* const from = factor + other * numel;
        take_away(product(from, column, numel), from, column, numel);
      }
    }
    const double length = std::sqrt(product(column, column, numel));
    if (std::isfinite(before) && length <= kNothing * before) {
      std::fill_n(column, numel, 0.0f);
    } else {
      for (std::size_t i = 0; i < numel; ++i) column[i] = static_cast<float>(static_cast<double>(column[i]) / length);
    }
  }
}

void draw_missing(std::int64_t number, float* factor, std::size_t rank, std::size_t numel) {
  for (std::size_t k = 0; k < rank; ++k) {
    float* const column = factor + k * numel;
    if (std::any_of(column, column + numel, [](float value) { return value != 0; })) continue;
    const std::uint64_t stream = mixed(mixed(static_cast<std::uint64_t>(number) + 1) + k);
    for (std::size_t i = 0; i < numel; ++i) {
      const std::uint64_t bits = mixed(stream + (i + 1) * 0x9e3779b97f4a7c15u) >> 40;  // 24 bits fit fp32
      column[i] = (static_cast<float>(bits) + 0.5f) / 8388608.0f - 1.0f;
    }
  }
}

}  // namespace tessera
