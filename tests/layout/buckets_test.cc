// Tests how items are divided into buckets of limited size.

#include "sharding/layout/buckets.h"

#include <gmock/gmock.h>

#include <random>
#include <set>

namespace tessera {
namespace {

using Buckets = std::vector<std::vector<std::size_t>>;

std::vector<BucketItem> items_of(const std::vector<std::int64_t>& bytes) {
  std::vector<BucketItem> items;
  for (const std::int64_t each : bytes) items.push_back({each});
  return items;
}

TEST(Buckets, FirstBucketHasItsOwnSmallerLimit) {
  EXPECT_EQ(fill_buckets(items_of({4, 6, 1, 9, 10, 2, 18}), {10, 20}), (Buckets{{0, 1}, {2, 3, 4}, {5, 6}}));
  EXPECT_EQ(fill_buckets({}, {10, 20}), Buckets{});
}

TEST(Buckets, ItemAboveTheLimitGetsABucketOfItsOwn) {
  EXPECT_EQ(fill_buckets(items_of({50, 3, 50, 3, 4}), {10, 20}), (Buckets{{0}, {1}, {2}, {3, 4}}));
}

TEST(Buckets, FirstBucketIsNeverAboveTheCap) {
  EXPECT_EQ(fill_buckets(items_of({4, 4, 4}), {100, 8}), (Buckets{{0, 1}, {2}}));
}

TEST(Buckets, CapOfZeroPutsEachItemIntoItsOwnBucket) {
  EXPECT_EQ(fill_buckets(items_of({4, 0, 0, 7}), {100, 0}), (Buckets{{0}, {1}, {2}, {3}}));
}

TEST(Buckets, EachBucketHoldsOneDtype) {
  const std::vector<BucketItem> items = {
      {4, DType::kBF16}, {4, DType::kF32}, {4, DType::kBF16}, {8, DType::kBF16}, {4, DType::kF32}};
  EXPECT_EQ(fill_buckets(items, {8, 16}), (Buckets{{0, 2}, {1, 4}, {3}}));
}

TEST(Buckets, RandomItemsKeepOrderLimitAndDtype) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<BucketItem> items(random() % 40);
    for (BucketItem& item : items)
      item = {static_cast<std::int64_t>(random() % 30), random() % 2 ? DType::kF32 : DType::kBF16};
    const BucketLimits limits{static_cast<std::int64_t>(1 + random() % 30),
                              static_cast<std::int64_t>(1 + random() % 40)};
    std::set<std::size_t> seen;
    std::map<DType, std::size_t> next;  // used to check that items of a dtype come in order
    std::set<DType> begun;
    for (const std::vector<std::size_t>& bucket : fill_buckets(items, limits)) {
      ASSERT_FALSE(bucket.empty());
      const DType dtype = items[bucket[0]].dtype;
      const bool is_first = begun.insert(dtype).second;
      std::int64_t bytes = 0;
      for (const std::size_t item : bucket) {
        ASSERT_TRUE(seen.insert(item).second);
        ASSERT_EQ(items[item].dtype, dtype);
        ASSERT_GE(item, next[dtype]);
        next[dtype] = item + 1;
        bytes += items[item].bytes;
      }
      const std::int64_t limit = is_first ? std::min(limits.first_bytes, limits.cap_bytes) : limits.cap_bytes;
      ASSERT_TRUE(bytes <= limit || bucket.size() == 1);
    }
    ASSERT_EQ(seen.size(), items.size());
  }
}

}  // namespace
}  // namespace tessera
