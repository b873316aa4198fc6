#include "optim/adafactor.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "optim/adafactor_numbers.h"

namespace tessera {
namespace {

using Lanes = std::array<double, kAdafactorLanes>;

/// The number of sums that fit into the registers of every x86-64 processor.
constexpr std::size_t kAtOnce = 16;

/// Adds the `term` of value i to lane i modulo kAdafactorLanes, for all values.
template <class Term>
void add_to(Lanes& lanes, std::span<const float> values, const Term& term) {
  for (std::size_t first = 0; first < kAdafactorLanes; first += kAtOnce) {
    std::array<double, kAtOnce> sums;
    std::copy_n(lanes.begin() + first, kAtOnce, sums.begin());
    std::size_t i = first;
    for (; i + kAtOnce <= values.size(); i += kAdafactorLanes) {
      for (std::size_t lane = 0; lane < kAtOnce; ++lane) sums[lane] += term(values[i + lane]);
    }
    for (std::size_t lane = 0; i + lane < values.size(); ++lane) sums[lane] += term(values[i + lane]);
    std::copy_n(sums.begin(), kAtOnce, lanes.begin() + first);
  }
}

template <std::size_t kHalf = kAdafactorLanes / 2>
double joined(Lanes& lanes) {
  for (std::size_t lane = 0; lane < kHalf; ++lane) lanes[lane] += lanes[lane + kHalf];
  if constexpr (kHalf > 1) joined<kHalf / 2>(lanes);
  return lanes[0];
}

/// Returns the sum of the terms of at most kAdafactorLanes values. Lanes that would be zero are left out; this does not
/// change the sum.
template <class Term>
double sum_of_few(std::span<const float> values, const Term& term) {
  Lanes lanes;
  std::size_t count = values.size();
  for (std::size_t lane = 0; lane < count; ++lane) lanes[lane] = term(values[lane]);
  for (std::size_t half = std::bit_ceil(count) / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane + half < count; ++lane) lanes[lane] += lanes[lane + half];
    count = std::min(count, half);
  }
  return lanes[0];
}

/// Calls `body(block)` for each block of kAdafactorBlock values. A block's size is a multiple of the number of lanes,
/// and a block stays in the first-level cache while `add_to` works.
template <class Body>
void for_blocks(std::span<const float> values, const Body& body) {
  for (std::size_t begin = 0; begin < values.size(); begin += kAdafactorBlock) {
    body(values.subspan(begin, std::min(kAdafactorBlock, values.size() - begin)));
  }
}

template <class Term>
double sum_over_lanes(std::span<const float> values, const Term& term) {
  if (values.size() <= kAdafactorLanes) return sum_of_few(values, term);
  Lanes lanes{};
  for_blocks(values, [&](std::span<const float> block) { add_to(lanes, block, term); });
  return joined(lanes);
}

double sum_of_squares(std::span<const float> values) {
  return sum_over_lanes(values, [](float value) { return adafactor_square(value); });
}

/// Returns the sum of squares over a whole tensor.
double sum_of_blocks(std::span<const float> values) {
  Lanes lanes{};
  std::size_t next = 0;
  for_blocks(values, [&](std::span<const float> block) { lanes[next++ % kAdafactorLanes] += sum_of_squares(block); });
  return joined(lanes);
}

/// One matrix of a tensor: the elements that have the same index in all dimensions but the last two.
struct Matrix {
  std::size_t rows, columns;
  std::span<float> gradient, row_var, col_var;

  std::span<float> row(std::size_t r) const { return gradient.subspan(r * columns, columns); }
};

void move_rows(const Matrix& m, float weight) {
  for (std::size_t r = 0; r < m.rows; ++r) {
    adafactor_move(m.row_var[r], adafactor_mean(sum_of_squares(m.row(r)), m.columns), weight);
  }
}

/// Adds up squares in `count` columns of `rows` neighbouring rows. `g` points to the first of these elements.
template <class Count>
void add_up_columns(double* totals, const float* g, std::size_t rows, std::size_t stride, Count count) {
  std::array<double, kAtOnce> sums{};
  for (std::size_t r = 0; r < rows; ++r, g += stride) {
    for (std::size_t c = 0; c < count; ++c) sums[c] += adafactor_square(g[c]);
  }
  for (std::size_t c = 0; c < count; ++c) totals[c] += sums[c];
}

/// Handles the columns in groups of kStrips strips, so that the sums of a group fit on the stack. A strip has kAtOnce
/// columns. All strips of a group are summed for one block of rows before the next block, since they share the pages in
/// which the block lies.
void move_columns(const Matrix& m, float weight) {
  constexpr std::size_t kStrips = 8;
  for (std::size_t begin = 0; begin < m.columns; begin += kStrips * kAtOnce) {
    const std::size_t count = std::min(kStrips * kAtOnce, m.columns - begin);
    std::array<double, kStrips * kAtOnce> totals;
    std::fill_n(totals.begin(), count, 0.0);
    for (std::size_t first = 0; first < m.rows; first += kAdafactorRows) {
      const std::size_t rows = std::min(kAdafactorRows, m.rows - first);
      const float* const g = m.gradient.data() + first * m.columns + begin;
      std::size_t c = 0;
      for (; c + kAtOnce <= count; c += kAtOnce) {
        add_up_columns(totals.data() + c, g + c, rows, m.columns, std::integral_constant<std::size_t, kAtOnce>());
      }
      if (c < count) add_up_columns(totals.data() + c, g + c, rows, m.columns, count - c);
    }
    for (std::size_t c = 0; c < count; ++c) {
      adafactor_move(m.col_var[begin + c], adafactor_mean(totals[c], m.rows), weight);
    }
  }
}

void divide_by_rows_and_columns(const Matrix& m) {
  const double sum = sum_over_lanes(m.row_var, [](float value) { return static_cast<double>(value); });
  const float mean = adafactor_mean_of_rows(sum, m.rows);
  for (std::size_t r = 0; r < m.rows; ++r) {
    const std::span<float> row = m.row(r);
    const float of_row = m.row_var[r];
    for (std::size_t c = 0; c < m.columns; ++c) {
      row[c] = adafactor_divided(row[c], adafactor_variance(of_row, m.col_var[c], mean));
    }
  }
}

void divide_factored(const AdafactorTensor& t, float weight) {
  const auto rows = static_cast<std::size_t>(t.rows), columns = static_cast<std::size_t>(t.columns);
  for (std::size_t i = 0; i < static_cast<std::size_t>(t.matrices); ++i) {
    const Matrix m{rows, columns, t.gradient.subspan(i * rows * columns, rows * columns),
                   t.row_var.subspan(i * rows, rows), t.col_var.subspan(i * columns, columns)};
    move_rows(m, weight);
    move_columns(m, weight);
    divide_by_rows_and_columns(m);
  }
}

void divide_elements(const AdafactorTensor& t, float weight) {
  for (std::size_t i = 0; i < t.gradient.size(); ++i) {
    const float g = t.gradient[i];
    adafactor_move(t.variance[i], g * g, weight);
    t.gradient[i] = adafactor_divided(g, t.variance[i]);
  }
}

}  // namespace

AdafactorNumbers adafactor_numbers(const AdafactorConfig& config, const AdafactorStep& numbers) {
  const auto step = static_cast<double>(numbers.step);
  return {.rate = std::min(numbers.lr, 1 / std::sqrt(step)),
          .min_rms = config.min_rms,
          .clip_threshold = config.clip_threshold,
          .weight = static_cast<float>(std::pow(step, config.beta2_decay)),
          .kept = static_cast<float>(1 - numbers.lr * numbers.weight_decay)};
}

std::size_t adafactor_scratch(const AdafactorTensor& tensor) {
  return tensor.parameter.empty() ? 0 : AdafactorSums(tensor).count();
}

void step_adafactor(const AdafactorConfig& config, const AdafactorStep& step, const AdafactorTensor& t) {
  if (t.parameter.empty()) return;
  const AdafactorNumbers numbers = adafactor_numbers(config, step);
  t.row_var.empty() ? divide_elements(t, numbers.weight) : divide_factored(t, numbers.weight);
  const float moved =
      adafactor_moved(numbers, sum_of_blocks(t.parameter), sum_of_blocks(t.gradient), t.parameter.size());
  for (std::size_t i = 0; i < t.parameter.size(); ++i) {
    t.parameter[i] = adafactor_updated(t.parameter[i], t.gradient[i], numbers.kept, moved);
  }
}

}  // namespace tessera
