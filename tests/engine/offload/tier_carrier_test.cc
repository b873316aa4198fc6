// Tests leases of offloaded records, and how far in advance records are read.

#include "engine/memory/records/tier_carrier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#include "offload/file_tier.h"
#include "tests/offload/scratch.h"
#include "tests/support/limits/patience.h"

namespace tessera::testing {
namespace tier_carrier_test {

constexpr std::int64_t kRecords = 80, kReadAhead = 4;

/// Makes records. Three in four of them stay in memory. All records were written once.
std::unique_ptr<TierCarrier> mostly_in_memory(const ScratchFolder& folder) {
  FileTierOptions options;
  options.records = kRecords;
  options.record_bytes = 4096;
  options.who = "test";
  options.paths = {{folder.path()}};
  options.read_ahead = options.write_behind = kReadAhead;
  options.resident_bytes = 60 * 4096;
  auto records = std::make_unique<TierCarrier>(FileTier::create(options).value());
  for (std::int64_t record = 0; record < kRecords; ++record) {
    records->visit(record, /*updates=*/true, [&](std::byte* memory) { std::memset(memory, record + 1, 4096); });
  }
  records->flush();
  return records;
}

std::vector<std::int64_t> forward() {
  std::vector<std::int64_t> order(kRecords);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

constexpr int kMostAhead = 2 * kReadAhead;  // the limit if nothing is written

/// Waits until the tier has read this number of records.
void read_ahead(TierCarrier& records, std::int64_t reads) {
  for (Deadline limit(std::chrono::seconds(20)); records.counters().reads < reads && !limit.passed();)
    records.read_ahead();
  EXPECT_EQ(records.counters().reads, reads);
}

// Records that stay in memory do not count as records that are read in advance. The disk therefore always has as many
// requests as are allowed, until the end of the pass is near.
TEST(TierCarrier, ReadAheadStaysAtItsLimit) {
  ScratchFolder folder;
  const auto records = mostly_in_memory(folder);
  const std::int64_t not_there = 20;  // number of records on disk
  ASSERT_EQ(records->counters().writes, not_there);
  records->announce(forward());
  EXPECT_GE(records->counters().reads, kReadAhead);
  read_ahead(*records, kMostAhead);
  std::int64_t used = 0;
  for (std::int64_t record = 0; record < kRecords; ++record) {
    const std::int64_t before = records->counters().hits;
    records->visit(record, /*updates=*/false, [&](const std::byte* memory) {
      EXPECT_EQ(memory[4095], static_cast<std::byte>(record + 1)) << record;
    });
    used += records->counters().hits == before ? 1 : 0;  // the record was read
    EXPECT_EQ(records->counters().reads, std::min(used + kMostAhead, not_there)) << record;
  }
  records->flush();
  EXPECT_EQ(used, not_there);
}

TEST(TierCarrier, SkippedRecordsMakeRoomForLaterReads) {
  ScratchFolder folder;
  const auto records = mostly_in_memory(folder);
  const std::vector<std::int64_t> order = forward();
  records->announce(order);
  read_ahead(*records, kMostAhead);
  records->announce(std::span(order).subspan(40));  // ten are on disk; eight of them were read ahead
  EXPECT_EQ(records->counters().reads, 2 * kMostAhead);
  records->visit(41, /*updates=*/false, [](const std::byte*) {});
  records->flush();
  EXPECT_EQ(records->counters().reads, 2 * kMostAhead);
  records->announce(forward());
  EXPECT_EQ(records->counters().reads, 3 * kMostAhead);
  records->flush();
}

/// Makes four records of zeros, all of them on disk. Two of them may be held at a time.
std::unique_ptr<TierCarrier> on_disk(const ScratchFolder& folder) {
  FileTierOptions options;
  options.records = 4;
  options.record_bytes = 4096;
  options.who = "test";
  options.paths = {{folder.path()}};
  options.read_ahead = options.write_behind = 1;
  options.most_held = 2;
  return std::make_unique<TierCarrier>(FileTier::create(options).value());
}

TEST(TierCarrier, LeasesOfOneRecordThatFollowEachOtherMoveItOnce) {
  ScratchFolder folder;
  const auto carrier = on_disk(folder);
  for (const LeaseUse use : {LeaseUse::kRead, LeaseUse::kChange, LeaseUse::kRead}) {
    Lease lease = carrier->acquire(2, use);
    if (use == LeaseUse::kChange) lease.bytes()[0] = std::byte{7};
    lease.give_back();
  }
  EXPECT_EQ(carrier->counters().gets, 1);
  EXPECT_EQ(carrier->counters().writes, 0);
  carrier->flush();
  EXPECT_EQ(carrier->counters().writes, 1) << "one lease changed it";
  const Lease again = carrier->acquire(2, LeaseUse::kRead);
  EXPECT_EQ(again.bytes()[0], std::byte{7});
}

TEST(TierCarrier, SeveralLeasesLastAtOnceAndOnlyChangedRecordsAreWritten) {
  ScratchFolder folder;
  const auto carrier = on_disk(folder);
  {
    Lease changed = carrier->acquire(0, LeaseUse::kChange);
    const Lease read = carrier->acquire(1, LeaseUse::kRead);
    EXPECT_NE(changed.bytes().data(), read.bytes().data());
    changed.bytes()[0] = std::byte{1};
  }
  carrier->flush();
  EXPECT_EQ(carrier->counters().writes, 1);
  for (const std::int64_t record : {0, 1, 2, 3}) {
    const Lease lease = carrier->acquire(record, LeaseUse::kRead);
    EXPECT_EQ(lease.bytes()[0], std::byte(record == 0 ? 1 : 0)) << record;
  }
}

// A visit that fails halfway leaves its changes in the record, as it does if the state is in memory.
TEST(TierCarrier, DroppedLeaseLeavesWhatIsInMemory) {
  ScratchFolder folder;
  const auto carrier = on_disk(folder);
  const auto fails = [](std::byte* memory) {
    memory[0] = std::byte{5};
    throw std::runtime_error("a rule failed");
  };
  EXPECT_THROW(carrier->visit(1, /*updates=*/true, fails), std::runtime_error);
  carrier->flush();
  EXPECT_EQ(carrier->counters().writes, 1);
  const Lease lease = carrier->acquire(1, LeaseUse::kRead);
  EXPECT_EQ(lease.bytes()[0], std::byte{5});
}

}  // namespace tier_carrier_test
}  // namespace tessera::testing
