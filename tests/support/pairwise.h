#pragma once

#include <cstddef>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/limits/long_tests.h"

namespace tessera::testing {

// Most faults in a grid of cases (strategies x ranks x dtypes ...) appear with one value of one dimension, or with one
// pair of values of two dimensions. A pairwise sample finds these faults with far fewer points than the whole grid:
// every two values of two dimensions occur together in a point of the sample. The pairwise sample of a grid of two
// dimensions is the grid itself, so the sample is smaller only from three dimensions on. If another test covers the
// other pairs, a sample may cover only all pairs of the first two dimensions, and each value of the other dimensions.

/// A point of a grid: the index of a value for each dimension.
using GridPoint = std::vector<std::size_t>;
/// Returns whether a case exists. If the filter is null, all cases exist.
using GridFilter = std::function<bool(const GridPoint&)>;

/// Returns all points of a grid with `sizes[d]` values in dimension d, in the order of nested loops: the last dimension
/// changes fastest.
inline std::vector<GridPoint> grid_product(const std::vector<std::size_t>& sizes, const GridFilter& exists = nullptr) {
  std::vector<GridPoint> points;
  const std::size_t count = std::accumulate(sizes.begin(), sizes.end(), std::size_t{1}, std::multiplies<std::size_t>());
  for (std::size_t n = 0; n < count; ++n) {
    GridPoint point(sizes.size());
    std::size_t rest = n;
    for (std::size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) point[d] = rest % sizes[d];
    if (!exists || exists(point)) points.push_back(std::move(point));
  }
  return points;
}

/// Returns a pairwise sample of these points, which is the same in each call. Every two values of two dimensions that
/// occur together in any point occur together in one point of the sample. The point that adds the most pairs is taken
/// first. If several points add equally many pairs, the point with smaller indices is taken first. So a test that lists
/// cheap values first gets cheap points.
///
/// `paired` is the number of dimensions, counted from the first, whose values are paired. Each value of the other
/// dimensions is in at least one point. If `paired` is less than the number of dimensions and several points add
/// equally many pairs, the point whose values were used least is taken first. If several points are still equal, the
/// point with smaller indices is taken. So the other dimensions take turns.
inline std::vector<GridPoint> pairwise_sample(const std::vector<std::size_t>& sizes, const GridFilter& exists = nullptr,
                                              std::size_t paired = std::numeric_limits<std::size_t>::max()) {
  const std::vector<GridPoint> points = grid_product(sizes, exists);
  std::vector<bool> taken(points.size(), false);
  // The first index is the number of a pair of dimensions, and the second index is the number of a pair of their
  // values.
  std::vector<std::vector<bool>> covered(sizes.size() * sizes.size());
  const auto each_pair = [&](const GridPoint& point, const auto& call) {
    for (std::size_t a = 0; a < sizes.size(); ++a) {
      for (std::size_t b = a; b < sizes.size(); ++b) {  // b == a: a grid of one dimension keeps all its points
        if (b != a && b >= paired) break;
        std::vector<bool>& pairs = covered[a * sizes.size() + b];
        pairs.resize(sizes[a] * sizes[b], false);
        call(pairs, point[a] * sizes[b] + point[b]);
      }
    }
  };
  std::vector<std::vector<std::size_t>> used;  // [dimension][value]
  for (const std::size_t size : sizes) used.emplace_back(size, 0);
  const auto uses = [&](const GridPoint& point) {
    std::size_t sum = 0;
    for (std::size_t d = 0; paired < sizes.size() && d < sizes.size(); ++d) sum += used[d][point[d]];
    return sum;
  };
  while (true) {
    std::size_t best = 0, most = 0;
    for (std::size_t i = 0; i < points.size(); ++i) {
      std::size_t adds = 0;
      each_pair(points[i], [&](const std::vector<bool>& pairs, std::size_t pair) { adds += pairs[pair] ? 0 : 1; });
      if (adds > most || (adds == most && adds > 0 && uses(points[i]) < uses(points[best]))) {
        most = adds;
        best = i;
      }
    }
    if (most == 0) break;
    taken[best] = true;
    each_pair(points[best], [](std::vector<bool>& pairs, std::size_t pair) { pairs[pair] = true; });
    for (std::size_t d = 0; d < sizes.size(); ++d) ++used[d][points[best][d]];
  }
  std::vector<GridPoint> sample;
  for (std::size_t i = 0; i < points.size(); ++i) {
    if (taken[i]) sample.push_back(points[i]);
  }
  return sample;
}

/// Returns the points that a test runs: a pairwise sample, or all points in long tests (long_tests.h).
inline std::vector<GridPoint> pairwise(const std::vector<std::size_t>& sizes, const GridFilter& exists = nullptr,
                                       std::size_t paired = std::numeric_limits<std::size_t>::max()) {
  return tests_are_long() ? grid_product(sizes, exists) : pairwise_sample(sizes, exists, paired);
}

/// Returns the values of each point for which `exists(values...)` is true. The function replaces nested loops:
///     for (const auto& [kind, dtype, ranks] : pairwise_where(exists, kKinds, kDTypes, kRanks))
/// kPaired is pairwise_sample's `paired`: pairwise_where<2>(...) has all pairs of the first two ranges.
template <std::size_t kPaired = std::numeric_limits<std::size_t>::max(), class Exists, class... Ranges>
auto pairwise_where(const Exists& exists, const Ranges&... ranges) {
  const auto values_at = [&]<std::size_t... kD>(const GridPoint& point, std::index_sequence<kD...>) {
    return std::make_tuple(std::data(ranges)[point[kD]]...);
  };
  constexpr auto kDimensions = std::make_index_sequence<sizeof...(Ranges)>();
  const GridFilter filter = [&](const GridPoint& point) { return std::apply(exists, values_at(point, kDimensions)); };
  std::vector<decltype(values_at(GridPoint(), kDimensions))> cases;
  for (const GridPoint& point : pairwise({std::size(ranges)...}, filter, kPaired)) {
    cases.push_back(values_at(point, kDimensions));
  }
  return cases;
}

/// Does the same as pairwise_where in the case that all cases exist.
template <std::size_t kPaired = std::numeric_limits<std::size_t>::max(), class... Ranges>
auto pairwise_of(const Ranges&... ranges) {
  return pairwise_where<kPaired>([](const auto&...) { return true; }, ranges...);
}

/// A value that is made for the first of several points, and with which the other points are compared.
template <class T>
class MadeOnce {
 public:
  template <class Make>
  const T& operator()(const std::string& name, const Make& make) {
    const auto at = made_.find(name);
    return at != made_.end() ? at->second : made_.emplace(name, make()).first->second;
  }

 private:
  std::map<std::string, T> made_;
};

}  // namespace tessera::testing
