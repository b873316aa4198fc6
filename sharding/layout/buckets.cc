#include "sharding/layout/buckets.h"

#include <algorithm>
#include <map>

namespace tessera {

std::vector<std::vector<std::size_t>> fill_buckets(std::span<const BucketItem> items, const BucketLimits& limits) {
  struct Open {
    std::size_t bucket = 0;
    std::int64_t bytes = 0, limit = 0;
  };
  std::vector<std::vector<std::size_t>> buckets;
  std::map<DType, Open> open_buckets;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto [at, is_first] = open_buckets.try_emplace(items[i].dtype);
    Open& open = at->second;
    if (is_first || limits.cap_bytes == 0 || open.bytes + items[i].bytes > open.limit) {
      open = {buckets.size(), 0, is_first ? std::min(limits.first_bytes, limits.cap_bytes) : limits.cap_bytes};
      buckets.emplace_back();
    }
    buckets[open.bucket].push_back(i);
    open.bytes += items[i].bytes;
  }
  return buckets;
}

}  // namespace tessera
