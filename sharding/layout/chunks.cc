#include "sharding/layout/chunks.h"

#include <algorithm>
#include <cmath>

namespace tessera {

Chunks::Chunks(std::int64_t numel, std::int64_t chunk_numel)
    : numel_(numel),
      chunk_numel_(chunk_numel),
      chunks_((numel + chunk_numel - 1) / chunk_numel),
      first_record_(chunks_) {}

Extent Chunks::chunk(std::int64_t index) const { return intersect({index * chunk_numel_, chunk_numel_}, {0, numel_}); }

std::int64_t Chunks::first_below(double share) const {
  return chunks_ - static_cast<std::int64_t>(std::ceil(share * static_cast<double>(chunks_)));
}

Chunks parameter_chunks(std::int64_t numel, std::int64_t element_bytes, std::int64_t record_bytes, double share) {
  const std::int64_t pages = std::max<std::int64_t>(1, record_bytes / Chunks::kPage);
  Chunks chunks(numel, pages * Chunks::kPage / element_bytes);
  chunks.put_below(chunks.first_below(share));
  return chunks;
}

}  // namespace tessera
