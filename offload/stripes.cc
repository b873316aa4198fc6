#include "offload/stripes.h"

#include <numeric>

namespace tessera {
namespace {

template <typename Visit>
void for_each_place(std::span<const double> weights, std::int64_t records, const Visit& visit) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::int64_t> placed(weights.size());
  for (std::int64_t record = 0; record < records; ++record) {
    std::size_t best = 0;
    double most_behind = -1e300;
    for (std::size_t file = 0; file < weights.size(); ++file) {
      const double behind = weights[file] / sum * static_cast<double>(record + 1) - static_cast<double>(placed[file]);
      if (behind <= most_behind) continue;
      most_behind = behind;
      best = file;
    }
    visit(record, StripePlace{.file = static_cast<std::int32_t>(best), .index = placed[best]++});
  }
}

}  // namespace

void place_in_stripes(std::span<const double> weights, std::span<StripePlace> places) {
  for_each_place(weights, static_cast<std::int64_t>(places.size()),
                 [&](std::int64_t record, StripePlace place) { places[static_cast<std::size_t>(record)] = place; });
}

}  // namespace tessera
