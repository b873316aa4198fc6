#include "sharding/compress/kept_gradients.h"

namespace tessera {

std::vector<Extent> rounded_runs(int rank, int ranks, int part, std::int64_t numel, bool scatters) {
  if (part == 0) return {};
  const int place = rank % part;  // the rank's index on its host
  if (!scatters) {
    const std::int64_t each = numel / part;
    return {{place * each, each}};
  }
  // For each host, this rank rounds the part that belongs to the rank with the same index on that host.
  const std::int64_t each = numel / ranks;
  if (part == 1) return {{0, each * ranks}};
  std::vector<Extent> runs;
  for (int first = 0; first < ranks; first += part) runs.push_back({(first + place) * each, each});
  return runs;
}

}  // namespace tessera
