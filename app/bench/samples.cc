#include "app/bench/samples.h"

#include <algorithm>
#include <cmath>

namespace tessera {

double Samples::quantile_s(double p) const {
  if (ns.empty()) return 0;
  std::vector<std::int64_t> sorted = ns;
  const auto rank = static_cast<std::size_t>(std::ceil(p * static_cast<double>(sorted.size())));
  const auto place =
      sorted.begin() + static_cast<std::ptrdiff_t>(std::clamp<std::size_t>(rank, 1, sorted.size()) - 1);
  std::nth_element(sorted.begin(), place, sorted.end());
  return static_cast<double>(*place) * 1e-9;
}

}  // namespace tessera
