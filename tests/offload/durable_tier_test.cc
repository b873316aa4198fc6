// Tests the tier whose committed records outlive the process.

#include "offload/durable_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <random>
#include <thread>

#include "offload/file_tier.h"
#include "offload/files/fault_plan.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kRecords = 7;

FileTierOptions options_in(const ScratchFolder& folder) {
  FileTierOptions options;
  options.records = kRecords;
  options.record_bytes = 5000;
  options.sizes = {5000, 4096, 1, 5000, 4999, 5000, 17};
  options.who = "rank 3";
  options.paths = {{folder.path(), 1.0}};
  options.read_ahead = options.write_behind = 1;
  options.durable = "kept.records";
  return options;
}

std::unique_ptr<FileTier> made(const FileTierOptions& options) {
  auto tier = FileTier::create(options);
  EXPECT_TRUE(tier.ok()) << tier.status();
  return *std::move(tier);
}

void put(FileTier& tier, std::int64_t record, int value) {
  const auto memory = tier.get(record);
  ASSERT_TRUE(memory.ok()) << memory.status();
  std::ranges::fill(*memory, static_cast<std::byte>(value));
  ASSERT_TRUE(tier.put(record).ok());
}

/// Returns the number that all bytes of a record have. Returns -1 if they are not all the same.
int value_of(FileTier& tier, std::int64_t record) {
  const auto memory = tier.get(record);
  EXPECT_TRUE(memory.ok()) << memory.status();
  const int first = static_cast<int>(memory->front());
  const bool alike = std::ranges::all_of(*memory, [&](std::byte byte) { return static_cast<int>(byte) == first; });
  EXPECT_TRUE(tier.release(record).ok());
  return alike ? first : -1;
}

// The test has a model of the values that must be restored: whatever is written after a commit, the next process finds
// the commit's values.
TEST(DurableTier, CommitComesBackWhateverIsPutAfterIt) {
  std::mt19937 random(7);
  const auto up_to = [&](int most) { return std::uniform_int_distribution<int>(0, most)(random); };
  const ScratchFolder folder;
  std::map<std::int64_t, int> committed;
  std::string where;
  for (int process = 0; process < 20; ++process) {
    const auto tier = made(options_in(folder));
    if (!where.empty()) {
      ASSERT_TRUE(tier->protect(where).ok());
      for (int i = up_to(9); i > 0; --i) put(*tier, up_to(kRecords - 1), 200 + up_to(50));
      ASSERT_TRUE(tier->return_to(where).ok());
    }
    std::map<std::int64_t, int> now = committed;
    for (int i = up_to(40); i > 0; --i) {
      const std::int64_t record = up_to(kRecords - 1);
      if (up_to(3) == 0) {
        EXPECT_EQ(value_of(*tier, record), now.contains(record) ? now[record] : 0) << process;
      } else if (up_to(5) == 0) {
        ASSERT_TRUE(tier->end_writes().ok());
        where = tier->where();
        committed = now;
        std::thread writer([&] { EXPECT_TRUE(tier->sync().ok()); });
        for (int k = up_to(5); k > 0; --k) {
          const std::int64_t read = up_to(kRecords - 1);
          EXPECT_EQ(value_of(*tier, read), now.contains(read) ? now[read] : 0) << process;
        }
        writer.join();
        tier->committed();
      } else {
        put(*tier, record, now[record] = up_to(199));
      }
    }
  }
  EXPECT_FALSE(where.empty());
}

TEST(DurableTier, FileHasTwoPlacesARecordAndStays) {
  const ScratchFolder folder;
  const FileTierOptions options = options_in(folder);
  const auto bytes = FileTier::file_bytes(options);
  ASSERT_TRUE(bytes.ok());
  FileTierOptions scratch = options;
  scratch.durable.clear();
  EXPECT_EQ(bytes->at(0), 2 * FileTier::file_bytes(scratch)->at(0));
  made(options);
  EXPECT_EQ(static_cast<std::int64_t>(std::filesystem::file_size(folder.path() + "/kept.records")), bytes->at(0));
  EXPECT_EQ(*FileTier::memory_bytes(options), made(options)->allocated_bytes());
}

TEST(DurableTier, OverwrittenRecordsAreNotReadNorUnchangedOnesWritten) {
  const ScratchFolder folder;
  const auto tier = made(options_in(folder));
  const auto write_all = [&](int value) {
    for (std::int64_t i = 0; i < kRecords; ++i) {
      const auto memory = tier->get_to_overwrite(i);
      ASSERT_TRUE(memory.ok()) << memory.status();
      std::ranges::fill(*memory, static_cast<std::byte>(i == 0 ? 1 : value));
      ASSERT_TRUE(tier->put_if_changed(i).ok());
    }
    ASSERT_TRUE(tier->end_writes().ok());
    ASSERT_TRUE(tier->sync().ok());
    tier->committed();
  };
  write_all(1);
  EXPECT_EQ(tier->counters().writes, kRecords);
  write_all(2);
  EXPECT_EQ(tier->counters().writes, 2 * kRecords - 1);
  write_all(3);
  EXPECT_EQ(tier->counters().reads, 0);
  for (std::int64_t i = 0; i < kRecords; ++i) EXPECT_EQ(value_of(*tier, i), i == 0 ? 1 : 3);
}

TEST(DurableTier, DamagedRecordsAndWrongTablesAreNoticed) {
  const ScratchFolder folder;
  std::string where;
  {
    const auto tier = made(options_in(folder));
    for (std::int64_t i = 0; i < kRecords; ++i) put(*tier, i, 9);
    ASSERT_TRUE(tier->end_writes().ok());
    ASSERT_TRUE(tier->sync().ok());
    where = tier->where();
  }
  const auto tier = made(options_in(folder));
  EXPECT_EQ(exit_code_of(tier->protect(where.substr(1))), ExitCode::kCorruptData);
  where[3 * TwoPlaces::kTextBytes + 1] ^= 1;  // this damages the checksum of record 3
  ASSERT_TRUE(tier->protect(where).ok());
  ASSERT_TRUE(tier->return_to(where).ok());
  EXPECT_EQ(value_of(*tier, 2), 9);
  const absl::Status status = tier->get(3).status();
  EXPECT_EQ(exit_code_of(status), ExitCode::kCorruptData);
  EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 3"), HasSubstr("kept.records"), HasSubstr("checksum")));
}

TEST(DurableTier, FailedSyncIsAnErrorThatStays) {
  const ScratchFolder folder;
  const auto tier = made(options_in(folder));
  put(*tier, 0, 1);
  ScopedFaults failing({{.site = FaultSite::kFsync, .nth = 1, .action = FaultAction::kErrno, .number = EIO}});
  ASSERT_TRUE(tier->end_writes().ok());
  const auto failed = AllOf(HasSubstr("rank 3"), HasSubstr("fsync"), HasSubstr("errno 5"));
  EXPECT_THAT(message_of(tier->sync()), failed);
  EXPECT_THAT(message_of(tier->end_writes()), failed);  // the next commit fails, too
}

}  // namespace
}  // namespace tessera
