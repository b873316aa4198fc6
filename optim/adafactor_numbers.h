#pragma once

#include <cmath>
#include <cstddef>

#include "optim/adafactor.h"
#include "optim/arithmetic/scalar_lane.h"

namespace tessera {

/// Sizes in Adafactor's sums (adafactor.h): the numbers of lanes, of values in a block of a tensor, and of rows in a
/// block of a column.
constexpr std::size_t kAdafactorLanes = 32, kAdafactorBlock = 4096, kAdafactorRows = 256;

constexpr std::size_t adafactor_blocks(std::size_t count, std::size_t block) { return (count + block - 1) / block; }

/// Numbers that depend only on a step's options, computed on the host.
struct AdafactorNumbers {
  double rate, min_rms, clip_threshold;
  float weight, kept;
};
/// Computes the AdafactorNumbers of a step, on the host.
AdafactorNumbers adafactor_numbers(const AdafactorConfig& config, const AdafactorStep& numbers);

/// The numbers of doubles that a GPU keeps between kernels, by kind.
struct AdafactorSums {
  std::size_t blocks;       ///< sums of blocks of the parameter; the gradient has as many sums
  std::size_t column_sums;  ///< sums for columns that have more than one block of rows
  std::size_t means;        ///< means of `row_var`, one for each matrix

  explicit AdafactorSums(const AdafactorTensor& t) : blocks(adafactor_blocks(t.parameter.size(), kAdafactorBlock)) {
    const std::size_t row_blocks = adafactor_blocks(static_cast<std::size_t>(t.rows), kAdafactorRows);
    column_sums = row_blocks > 1 ? row_blocks * t.col_var.size() : 0;
    means = t.row_var.empty() ? 0 : static_cast<std::size_t>(t.matrices);
  }
  std::size_t count() const { return 1 + 2 * blocks + column_sums + means; }
};

// The arithmetic below is shared with GPUs.

/// Returns the same as std::max, also for NaNs.
template <class Float>
TESSERA_ALWAYS_INLINE Float adafactor_larger(Float a, Float b) {
  return a < b ? b : a;
}

TESSERA_ALWAYS_INLINE double adafactor_square(float value) { return static_cast<double>(value) * value; }

TESSERA_ALWAYS_INLINE float adafactor_mean(double sum, std::size_t count) {
  return static_cast<float>(sum / static_cast<double>(count));
}

/// Moves the mean towards `value` by the fraction `weight` of their difference.
TESSERA_ALWAYS_INLINE void adafactor_move(float& mean, float value, float weight) { mean += weight * (value - mean); }

constexpr float kAdafactorEps = 0x1p-23F;

/// Returns the mean of a matrix's `row_var`, but at least kAdafactorEps. `sum`: the sum of `row_var`.
TESSERA_ALWAYS_INLINE float adafactor_mean_of_rows(double sum, std::size_t rows) {
  return adafactor_larger(adafactor_mean(sum, rows), kAdafactorEps);
}

/// Returns v = r c^T / mean(r) for one element.
TESSERA_ALWAYS_INLINE float adafactor_variance(float of_row, float of_column, float mean_of_rows) {
  return of_row * of_column / mean_of_rows;
}

/// Returns u = g / sqrt(max(v, eps^2)) for one element.
TESSERA_ALWAYS_INLINE float adafactor_divided(float g, float v) {
  return g / ScalarLane::sqrt(adafactor_larger(v, kAdafactorEps * kAdafactorEps));
}

/// Returns the factor by which updates are multiplied. It is computed from the sums of squares of the parameter and of
/// the updates (`numel` numbers each).
TESSERA_ALWAYS_INLINE float adafactor_moved(const AdafactorNumbers& numbers, double of_parameter, double of_updates,
                                            std::size_t numel) {
  const auto count = static_cast<double>(numel);
  const double length = adafactor_larger(numbers.min_rms, std::sqrt(of_parameter / count)) * numbers.rate;
  const double clip = adafactor_larger(1.0, std::sqrt(of_updates / count) / numbers.clip_threshold);
  return static_cast<float>(length / clip);
}

TESSERA_ALWAYS_INLINE float adafactor_updated(float parameter, float update, float kept, float moved) {
  return parameter * kept - update * moved;
}

}  // namespace tessera
