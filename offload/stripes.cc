#include "offload/stripes.h"

#include <numeric>
#include <vector>

namespace tessera {

void place_in_stripes(std::span<const double> weights, std::span<StripePlace> places) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::int64_t> placed(weights.size());
  for (std::size_t record = 0; record < places.size(); ++record) {
    std::size_t best = 0;
    double most_behind = -1e300;
    for (std::size_t file = 0; file < weights.size(); ++file) {
      const double behind = weights[file] / sum * static_cast<double>(record + 1) - static_cast<double>(placed[file]);
      if (behind <= most_behind) continue;
      most_behind = behind;
      best = file;
    }
    places[record] = {.file = static_cast<std::int32_t>(best), .index = placed[best]++};
  }
}

}  // namespace tessera
