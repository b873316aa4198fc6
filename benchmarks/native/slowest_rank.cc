#include "benchmarks/native/slowest_rank.h"

#include <algorithm>

#include "runtime/base/status.h"

namespace tessera {

absl::Status take_slowest(Collectives& group, Samples& samples) {
  const std::size_t count = samples.ns.size();
  std::vector<std::int64_t> all(count * group.size());
  TESSERA_RETURN_IF_ERROR(
      group.all_gather("samples", samples.ns.data(), all.data(), count * sizeof(std::int64_t)).wait());
  for (std::size_t i = 0; i < all.size(); ++i) samples.ns[i % count] = std::max(samples.ns[i % count], all[i]);
  return absl::OkStatus();
}

}  // namespace tessera
