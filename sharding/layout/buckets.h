#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

/// A gradient that will be put into a bucket.
struct BucketItem {
  std::int64_t bytes = 0;     ///< bytes on the wire, without padding
  DType dtype = DType::kF32;  ///< dtype of the parameter; a bucket is one flat buffer, so it holds one dtype
};

/// Largest bytes of a bucket. A larger item is a bucket by itself.
struct BucketLimits {
  /// limit for the first bucket of each dtype, which is small so that it is complete early
  std::int64_t first_bytes = 0;
  /// Limit for the other buckets, and for the first if this is smaller; 0: one item a bucket.
  std::int64_t cap_bytes = 0;
};

/// Puts items into buckets in the order given; an item that does not fit closes its dtype's bucket and begins the next.
/// Returns the items' numbers, bucket by bucket in the order in which buckets begin.
///
/// Invariants: every item is in exactly one bucket; a dtype's items are in order across its buckets and inside them; a
/// bucket beyond its limit holds one item.
std::vector<std::vector<std::size_t>> fill_buckets(std::span<const BucketItem> items, const BucketLimits& limits);

}  // namespace tessera
