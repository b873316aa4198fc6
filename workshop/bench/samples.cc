#include "workshop/bench/samples.h"

#include <algorithm>
#include <cmath>

namespace tessera {

double Samples::quantile_s(double p) const {
  if (ns.empty()) return 0;
  std::vector<std::int64_t> sorted = ns;
  const auto rank = static_cast<std::size_t>(std::ceil(p * static_cast<double>(sorted.size())));
  const auto place = sorted.begin() + static_cast<std::ptrdiff_t>(std::clamp<std::size_t>(rank, 1, sorted.size()) - 1);
  std::nth_element(sorted.begin(), place, sorted.end());
  return static_cast<double>(*place) * 1e-9;
}

double ratio_by_turns(const Samples& longer, const Samples& shorter, std::size_t a_turn) {
  const auto median_of_turn = [&](const Samples& samples, std::size_t turn) {
    const auto begin = samples.ns.begin() + static_cast<std::ptrdiff_t>(turn * a_turn);
    return Samples{{begin, begin + static_cast<std::ptrdiff_t>(a_turn)}}.median_s();
  };
  const std::size_t turns = std::min(longer.ns.size(), shorter.ns.size()) / a_turn;
  if (turns == 0) return 0;
  std::vector<double> ratios;
  for (std::size_t turn = 0; turn < turns; ++turn) {
    ratios.push_back(median_of_turn(longer, turn) / median_of_turn(shorter, turn));
  }
  std::sort(ratios.begin(), ratios.end());
  return (ratios[(turns - 1) / 2] + ratios[turns / 2]) / 2;
}

}  // namespace tessera
