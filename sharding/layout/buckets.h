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

/// The largest sizes of buckets, in bytes. A larger item becomes a bucket by itself.
struct BucketLimits {
  /// Limit for the first bucket of each dtype. It is small, so that this bucket is complete early.
  std::int64_t first_bytes = 0;
  /// Limit for the other buckets, and also for the first bucket if cap_bytes is smaller than first_bytes. If it is 0,
  /// each item becomes a bucket.
  std::int64_t cap_bytes = 0;
};

/// Puts items into buckets in the given order. An item that does not fit closes the bucket of its dtype and begins the
/// next bucket. Returns the items' indices, bucket by bucket, in the order in which buckets begin.
///
/// Invariants: every item is in exactly one bucket; the items of a dtype are in order, inside buckets and from bucket
/// to bucket. A bucket that exceeds its limit holds one item.
std::vector<std::vector<std::size_t>> fill_buckets(std::span<const BucketItem> items, const BucketLimits& limits);

}  // namespace tessera
