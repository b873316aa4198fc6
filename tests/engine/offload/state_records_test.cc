// Tests how far ahead offloaded records are read.

#include "engine/memory/records/state_records.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "offload/file_tier.h"
#include "tests/offload/scratch.h"
#include "tests/support/limits/patience.h"

namespace tessera::testing {
namespace state_records_test {

constexpr std::int64_t kRecords = 80, kReadAhead = 4;

/// Makes records, of which three in four stay in memory. All were put once.
std::unique_ptr<StateRecords> mostly_in_memory(const ScratchFolder& folder) {
  FileTierOptions options;
  options.records = kRecords;
  options.record_bytes = 4096;
  options.who = "test";
  options.paths = {{folder.path()}};
  options.read_ahead = options.write_behind = kReadAhead;
  options.resident_bytes = 60 * 4096;
  auto records = std::make_unique<StateRecords>(FileTier::create(options).value());
  for (std::int64_t record = 0; record < kRecords; ++record) {
    records->visit(record, /*updates=*/true, [&](std::byte* memory) { std::memset(memory, record + 1, 4096); });
  }
  records->end_pass();
  return records;
}

std::vector<std::int64_t> forward() {
  std::vector<std::int64_t> order(kRecords);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

constexpr int kMostAhead = 2 * kReadAhead;  // the limit if nothing is written

/// Waits until the tier has read this number of records.
void read_ahead(StateRecords& records, std::int64_t reads) {
  for (Deadline limit(std::chrono::seconds(20)); records.counters().reads < reads && !limit.passed();)
    records.read_ahead();
  EXPECT_EQ(records.counters().reads, reads);
}

// Records that stay in memory take no place among those that are read ahead. So the disk always has as many requests as
// are allowed, until the end of the pass is near.
TEST(StateRecords, ReadAheadStaysAtItsLimit) {
  ScratchFolder folder;
  const auto records = mostly_in_memory(folder);
  const std::int64_t not_there = 20;  // the last records lie in slots, and have made room when the pass comes to them
  ASSERT_EQ(records->counters().writes, not_there);
  records->begin_pass(forward());
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
  records->end_pass();
  EXPECT_EQ(used, not_there);
}

TEST(StateRecords, SkippedRecordsMakeRoomForLaterReads) {
  ScratchFolder folder;
  const auto records = mostly_in_memory(folder);
  records->begin_pass(forward());
  read_ahead(*records, kMostAhead);
  records->pass(40);  // ten records are on disk, of which eight were read ahead
  EXPECT_EQ(records->counters().reads, 2 * kMostAhead);
  records->visit(41, /*updates=*/false, [](const std::byte*) {});
  records->end_pass();
  EXPECT_EQ(records->counters().reads, 2 * kMostAhead);
  records->begin_pass(forward());
  EXPECT_EQ(records->counters().reads, 3 * kMostAhead);
  records->end_pass();
}

}  // namespace state_records_test
}  // namespace tessera::testing
