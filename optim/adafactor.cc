#include "optim/adafactor.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

namespace tessera {
namespace {

constexpr float kEps = 0x1p-23F;

/// Sums that are added up side by side, so that compilers find vectors in them.
constexpr std::size_t kLanes = 16;
using Lanes = std::array<double, kLanes>;

double sum_of_squares(std::span<const float> values) {
  Lanes lanes{};
  std::size_t i = 0;
  for (; i + kLanes <= values.size(); i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (std::size_t lane = 0; i < values.size(); ++i, ++lane) {
    const double value = values[i];
    lanes[lane] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

double root_mean_square(std::span<const float> values) {
  return std::sqrt(sum_of_squares(values) / static_cast<double>(values.size()));
}

/// Moves the mean by the share `weight` of its distance to `value`.
void move(float& mean, float value, float weight) { mean += weight * (value - mean); }

/// One matrix of a tensor.
struct Matrix {
  std::size_t rows, columns;
  std::span<float> gradient, row_var, col_var;

  std::span<float> row(std::size_t r) const { return gradient.subspan(r * columns, columns); }
};

void move_rows(const Matrix& m, float weight) {
  for (std::size_t r = 0; r < m.rows; ++r) {
    move(m.row_var[r], static_cast<float>(sum_of_squares(m.row(r)) / static_cast<double>(m.columns)), weight);
  }
}

/// In strips of columns, so that their sums need no memory.
void move_columns(const Matrix& m, float weight) {
  for (std::size_t begin = 0; begin < m.columns; begin += kLanes) {
    const std::size_t count = std::min(kLanes, m.columns - begin);
    Lanes sums{};
    for (std::size_t r = 0; r < m.rows; ++r) {
      const float* const g = m.gradient.data() + r * m.columns + begin;
      for (std::size_t lane = 0; lane < count; ++lane) sums[lane] += static_cast<double>(g[lane]) * g[lane];
    }
    for (std::size_t lane = 0; lane < count; ++lane) {
      move(m.col_var[begin + lane], static_cast<float>(sums[lane] / static_cast<double>(m.rows)), weight);
    }
  }
}

/// g / sqrt(v), in place of g.
float divided(float g, float v) { return g / std::sqrt(std::max(v, kEps * kEps)); }

void divide_by_rows_and_columns(const Matrix& m) {
  double sum = 0;
  for (const float r : m.row_var) sum += r;
  const float mean = std::max(static_cast<float>(sum / static_cast<double>(m.rows)), kEps);
  for (std::size_t r = 0; r < m.rows; ++r) {
    const std::span<float> row = m.row(r);
    const float of_row = m.row_var[r];
    for (std::size_t c = 0; c < m.columns; ++c) row[c] = divided(row[c], of_row * m.col_var[c] / mean);
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
    move(t.variance[i], g * g, weight);
    t.gradient[i] = divided(g, t.variance[i]);
  }
}

}  // namespace

void step_adafactor(const AdafactorConfig& config, const AdafactorStep& numbers, const AdafactorTensor& t) {
  if (t.parameter.empty()) return;
  const auto step = static_cast<double>(numbers.step);
  const double rate = std::min(numbers.lr, 1 / std::sqrt(step));
  const double length = std::max(config.min_rms, root_mean_square(t.parameter)) * rate;
  const auto weight = static_cast<float>(std::pow(step, config.beta2_decay));
  t.row_var.empty() ? divide_elements(t, weight) : divide_factored(t, weight);
  const double clip = std::max(1.0, root_mean_square(t.gradient) / config.clip_threshold);
  const auto kept = static_cast<float>(1 - numbers.lr * numbers.weight_decay),
             moved = static_cast<float>(length / clip);
  for (std::size_t i = 0; i < t.parameter.size(); ++i) {
    t.parameter[i] = t.parameter[i] * kept - t.gradient[i] * moved;
  }
}

}  // namespace tessera
