#include "runtime/comm/rounds/fit_links.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <utility>

namespace tessera {
namespace {

constexpr std::size_t kCosts = 4;
using Row = std::array<double, kCosts>;

Row row_of(const CallWork& work) { return {work.rounds, work.messages, work.bytes, work.adds}; }

/// Solves least squares with the columns that are `used`. It uses the normal equations, with columns scaled to length
/// 1. Returns false if the columns are not independent.
bool solve(std::span<const TimedWork> calls, const std::array<bool, kCosts>& used, Row& costs) {
  Row length{};
  for (const TimedWork& call : calls) {
    const Row row = row_of(call.work);
    for (std::size_t k = 0; k < kCosts; ++k) length[k] += std::pow(row[k] / call.seconds, 2);
  }
  std::array<std::array<double, kCosts + 1>, kCosts> equations{};
  for (std::size_t k = 0; k < kCosts; ++k) {
    if (!used[k]) {
      equations[k][k] = 1;  // this makes an unused column's cost 0
      continue;
    }
    for (const TimedWork& call : calls) {
      const Row row = row_of(call.work);
      const double own = row[k] / call.seconds / std::sqrt(length[k]);
      for (std::size_t j = 0; j < kCosts; ++j)
        if (used[j]) equations[k][j] += own * row[j] / call.seconds / std::sqrt(length[j]);
      equations[k][kCosts] += own;
    }
  }
  for (std::size_t k = 0; k < kCosts; ++k) {
    const auto best = std::max_element(equations.begin() + static_cast<std::ptrdiff_t>(k), equations.end(),
                                       [&](const auto& a, const auto& b) { return std::abs(a[k]) < std::abs(b[k]); });
    std::swap(equations[k], *best);
    if (!(std::abs(equations[k][k]) > 1e-9)) return false;
    for (std::size_t other = 0; other < kCosts; ++other) {
      if (other == k) continue;
      const double factor = equations[other][k] / equations[k][k];
      for (std::size_t j = k; j <= kCosts; ++j) equations[other][j] -= factor * equations[k][j];
    }
  }
  for (std::size_t k = 0; k < kCosts; ++k)
    costs[k] = used[k] ? equations[k][kCosts] / equations[k][k] / std::sqrt(length[k]) : 0;
  return true;
}

double squares_of(std::span<const TimedWork> calls, const Row& costs) {
  double squares = 0;
  for (const TimedWork& call : calls) {
    const Row row = row_of(call.work);
    double seconds = 0;
    for (std::size_t k = 0; k < kCosts; ++k) seconds += costs[k] * row[k];
    squares += std::pow(seconds / call.seconds - 1, 2);
  }
  return squares;
}

}  // namespace

// A system is solved for each choice of columns. The best solution without a number below 0 is the best fit without
// negative numbers. Four columns have few choices.
LinkFit fit_links(std::span<const TimedWork> calls) {
  if (calls.empty()) throw std::invalid_argument("a fit needs calls");
  for (const TimedWork& call : calls)
    if (!(call.seconds > 0)) throw std::invalid_argument("times must be above 0");
  Row best{};
  double least = squares_of(calls, best);
  for (unsigned columns = 1; columns < 1U << kCosts; ++columns) {
    std::array<bool, kCosts> used{};
    for (std::size_t k = 0; k < kCosts; ++k) used[k] = (columns >> k & 1) != 0;
    Row costs{};
    if (!solve(calls, used, costs) || *std::min_element(costs.begin(), costs.end()) < 0) continue;
    const double squares = squares_of(calls, costs);
    if (squares >= least * (1 - 1e-9)) continue;
    best = costs;
    least = squares;
  }
  return {best[0], best[1], best[2], best[3]};
}

}  // namespace tessera
