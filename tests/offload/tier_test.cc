// Tests tiers, which store records in memory or in a file: their bytes, memory, traffic, and faults of the disk.

#include "offload/tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "offload/file_tier.h"
#include "offload/host_tier.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"
#include "tests/support/limits/patience.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kRecordBytes = 10000;  // three blocks on disk, the last one not full
constexpr std::size_t kBlockBytes = 12288;

FileTierOptions small_tier(const ScratchFolder& folder, std::int64_t records) {
  return {.records = records,
          .record_bytes = kRecordBytes,
          .who = "rank 1 optimizer state",
          .record_name = [](std::int64_t record) { return "layers." + std::to_string(record) + ".weight"; },
          .paths = {{folder.path()}},
          .verify = true};
}

constexpr std::uint64_t kTag = 7;

/// The values that the tier should hold: a seed for each record, or 0 for zeros.
struct Model {
  explicit Model(RecordTier& tier) : tier(tier), seeds(static_cast<std::size_t>(tier.num_records())) {}

  static std::vector<std::byte> bytes_of(std::uint64_t seed, std::size_t bytes) {
    std::vector<std::byte> want(bytes);
    if (seed != 0) fill_pattern(want, seed);
    return want;
  }
  /// Gets a record, checks its bytes, and gives it new bytes.
  absl::Status update(std::int64_t record, std::uint64_t seed) {
    TESSERA_RETURN_IF_ERROR(look(record));
    TESSERA_ASSIGN_OR_RETURN(const std::span<std::byte> memory, tier.get(record));
    fill_pattern(memory, seed);
    seeds[static_cast<std::size_t>(record)] = seed;
    return tier.put(record);
  }
  /// Gets a record and checks its bytes. The record is not released.
  absl::Status look(std::int64_t record) {
    TESSERA_ASSIGN_OR_RETURN(const std::span<std::byte> memory, tier.get(record));
    const auto want = bytes_of(seeds[static_cast<std::size_t>(record)], memory.size());
    if (memory.size() == tier.record_bytes() && std::ranges::equal(memory, want)) return absl::OkStatus();
    return absl::InternalError("record " + std::to_string(record) + " has wrong bytes");
  }

  /// Begins to copy a record.
  absl::Status start_copy(std::int64_t record) {
    Copy& copy =
        copies.emplace_back(seeds[static_cast<std::size_t>(record)], AlignedMemory::make(kBlockBytes, "test").value());
    return tier.start_copy(record, copy.memory.span(), kTag);
  }
  /// Checks the bytes of all copies.
  absl::Status end_copies() {
    TESSERA_RETURN_IF_ERROR(tier.end_copies(kTag));
    for (const Copy& copy : copies) {
      if (!std::ranges::equal(copy.memory.span().first(kRecordBytes), bytes_of(copy.seed, kRecordBytes)))
        return absl::InternalError("a copy has wrong bytes");
    }
    copies.clear();
    return absl::OkStatus();
  }

  struct Copy {
    std::uint64_t seed = 0;
    AlignedMemory memory;
  };
  RecordTier& tier;
  std::vector<std::uint64_t> seeds;
  std::vector<Copy> copies;
};

struct TierVariant {
  std::string name;
  std::function<absl::StatusOr<std::unique_ptr<RecordTier>>(const ScratchFolder&, std::int64_t records)> make;
};

std::vector<TierVariant> tier_variants() {
  std::vector<TierVariant> variants;
  variants.push_back(
      {"Host", [](const ScratchFolder&, std::int64_t records) -> absl::StatusOr<std::unique_ptr<RecordTier>> {
         return HostTier::create({.records = records, .record_bytes = kRecordBytes, .who = "rank 1"});
       }});
  for (const IoVariant& io : io_variants()) {
    for (const bool resident : {false, true}) {
      variants.push_back(
          {(resident ? "PartlyResident" : "File") + io.name,
           [=](const ScratchFolder& folder, std::int64_t records) -> absl::StatusOr<std::unique_ptr<RecordTier>> {
             FileTierOptions options = small_tier(folder, records);
             options.paths.push_back({folder.path(), 2.5});
             options.most_held = 2;
             options.read_ahead = 3;
             options.write_behind = 2;
             options.resident_bytes = resident ? 5 * kRecordBytes + 1 : 0;
             options.direct = io.direct;
             options.io = io.ring;
             return FileTier::create(options);
           }});
    }
  }
  return variants;
}

class TierTest : public ::testing::TestWithParam<TierVariant> {};

TEST_P(TierTest, NewRecordsAreZeros) {
  ScratchFolder folder;
  const auto tier = GetParam().make(folder, 20).value();
  Model model(*tier);
  for (std::int64_t record : {0, 19, 7, 3}) {
    tier->fetch(record);
    ASSERT_TRUE(model.look(record).ok());
    ASSERT_TRUE(tier->release(record).ok());
  }
  EXPECT_EQ(tier->counters().reads, 0);
  EXPECT_EQ(tier->counters().hits, 4);
}

// Any order of fetches, gets, puts, releases, copies and flushes gives the same as a plain array. A copy has the bytes
// that the record held when the copy began.
TEST_P(TierTest, RecordsKeepTheirBytesInAnyOrderOfCalls) {
  ScratchFolder folder;
  for (const std::int64_t records : {1, 4, 30}) {
    const auto tier = GetParam().make(folder, records).value();
    Model model(*tier);
    std::mt19937_64 random(static_cast<std::uint64_t>(records));
    const auto any = [&] { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(records)); };
    for (std::uint64_t i = 1; i <= 600; ++i) {
      const std::int64_t record = any();
      switch (random() % 10) {
        case 0:
          ASSERT_TRUE(tier->flush().ok());
          break;
        case 8:
          ASSERT_TRUE(model.start_copy(record).ok());
          break;
        case 9: {
          const absl::Status status = model.end_copies();
          ASSERT_TRUE(status.ok()) << status;
          break;
        }
        case 1: {
          const absl::Status status = model.look(record);
          ASSERT_TRUE(status.ok()) << status;
          const std::int64_t other = any();  // two records are held at once
          if (other != record) {
            ASSERT_TRUE(model.update(other, i).ok());
          }
          ASSERT_TRUE(tier->release(record).ok());
          break;
        }
        case 2:
        case 3:
        case 4:
          tier->fetch(any() + 1);
          tier->fetch(any());
          break;
        default: {
          const absl::Status status = model.update(record, i);
          ASSERT_TRUE(status.ok()) << status;
          if (random() % 4 == 0) {
            ASSERT_TRUE(model.update(record, i + 1000).ok());  // the record is still being written
          }
        }
      }
    }
    ASSERT_TRUE(model.end_copies().ok());
    for (std::int64_t record = 0; record < records; ++record) {
      const absl::Status status = model.look(record);
      ASSERT_TRUE(status.ok()) << status;
      ASSERT_TRUE(tier->release(record).ok());
    }
  }
}

// A copy reads the same bytes, whatever the slots hold, and uses none of the slots.
TEST_P(TierTest, CopiesReadTheDiskAndTakeNoSlots) {
  ScratchFolder folder;
  const auto tier = GetParam().make(folder, 12).value();
  Model model(*tier);
  for (std::int64_t record = 0; record < 11; ++record)
    ASSERT_TRUE(model.update(record, static_cast<std::uint64_t>(record) + 1).ok());
  const TierCounters before = tier->counters();
  for (int times = 0; times < 2; ++times) {
    for (std::int64_t record = 0; record < 12; ++record)
      ASSERT_TRUE(model.start_copy(record).ok());  // one of the records was never written
    ASSERT_TRUE(model.end_copies().ok());
  }
  const TierCounters after = tier->counters();
  EXPECT_EQ(after.gets - before.gets, 24);
  EXPECT_EQ((after.reads - before.reads) + (after.hits - before.hits), 24);
  EXPECT_EQ((after.bytes_read - before.bytes_read), (after.reads - before.reads) * static_cast<int>(kBlockBytes));
  EXPECT_EQ(after.bytes_written, before.bytes_written);
  for (const std::int64_t record : {10, 8}) {  // these records were among the last records that were put
    ASSERT_TRUE(model.look(record).ok());
    ASSERT_TRUE(tier->release(record).ok());
  }
  EXPECT_EQ(tier->counters().reads, after.reads);
}

// The first error is named, every copy has ended, and the tier gives out no more records.
TEST_P(TierTest, FailedCopyIsAnErrorThatStays) {
  ScratchFolder folder;
  const auto tier = GetParam().make(folder, 12).value();
  if (tier->most_held() == 12) return;  // here, records lie in memory
  Model model(*tier);
  for (std::int64_t record = 0; record < 12; ++record) ASSERT_TRUE(model.update(record, 5).ok());
  ASSERT_TRUE(tier->flush().ok());
  ScopedFaults faults({{.site = FaultSite::kRead, .nth = 3, .action = FaultAction::kErrno, .number = EIO}});
  std::vector<std::int64_t> read;
  for (std::int64_t record = 5; record < 12; ++record) {
    if (!tier->stays_in_memory(record)) read.push_back(record);
    ASSERT_TRUE(model.start_copy(record).ok());
  }
  const absl::Status status = model.end_copies();
  EXPECT_EQ(exit_code_of(status), ExitCode::kIo) << status;
  EXPECT_THAT(message_of(status), HasSubstr("layers." + std::to_string(read[2]) + ".weight"));
  EXPECT_FALSE(model.start_copy(6).ok());
  EXPECT_FALSE(tier->get(6).ok());
}

// A record is wanted while it is slowly being written. The tier gives the bytes that were put, and does not read.
TEST_P(TierTest, RecordBeingWrittenIsNotReadBack) {
  ScratchFolder folder;
  const auto tier = GetParam().make(folder, 12).value();
  Model model(*tier);
  ScopedFaults faults({{.site = FaultSite::kWrite, .every = 1, .action = FaultAction::kDelay, .number = 20}});
  for (std::uint64_t round = 1; round <= 3; ++round) {
    for (const std::int64_t record : {10, 8}) {
      ASSERT_TRUE(model.update(record, round * 100 + static_cast<std::uint64_t>(record)).ok());
      if (round % 2 == 0) tier->fetch(record);
      ASSERT_TRUE(model.update(record, round * 200 + static_cast<std::uint64_t>(record)).ok());
    }
  }
  EXPECT_EQ(tier->counters().reads, 0);
  EXPECT_EQ(tier->counters().gets, tier->counters().hits);
}

TEST_P(TierTest, WrongCallIsAnErrorThatStays) {
  ScratchFolder folder;
  for (int kind = 0; kind < 6; ++kind) {
    const auto tier = GetParam().make(folder, 8).value();
    const auto record = [&]() -> absl::Status {
      if (kind == 0) return tier->put(3);
      if (kind == 1) return tier->release(3);
      if (kind == 2) return tier->get(8).status();
      const AlignedMemory memory = AlignedMemory::make(kBlockBytes, "test").value();
      if (kind == 3) return tier->start_copy(8, memory.span(), kTag);
      if (kind == 4) {
        TESSERA_RETURN_IF_ERROR(tier->get(6).status());
        return tier->start_copy(6, memory.span(), kTag);
      }
      for (std::int64_t i = 0; i <= tier->most_held() && i < 8; ++i) TESSERA_RETURN_IF_ERROR(tier->get(i).status());
      return tier->get(-1).status();
    };
    EXPECT_EQ(exit_code_of(record()), ExitCode::kInternal) << kind;
    EXPECT_EQ(exit_code_of(tier->get(0).status()), ExitCode::kInternal);
    EXPECT_EQ(exit_code_of(tier->flush()), ExitCode::kInternal);
  }
}

INSTANTIATE_TEST_SUITE_P(All, TierTest, ::testing::ValuesIn(tier_variants()),
                         [](const auto& info) { return info.param.name; });

// ---- Memory and sizes -----------------------------------------------------------------------------------------------

TEST(TierSizes, AllocatedBytesEqualThePrediction) {
  ScratchFolder folder;
  std::mt19937_64 random(3);
  for (int i = 0; i < 30; ++i) {
    FileTierOptions options = small_tier(folder, 1 + static_cast<std::int64_t>(random() % 40));
    options.record_bytes = 1 + random() % 30000;
    options.most_held = 1 + static_cast<int>(random() % 4);
    options.read_ahead = static_cast<int>(random() % 5);
    options.write_behind = static_cast<int>(random() % 5);
    options.resident_bytes = random() % 300000;
    options.verify = i % 2 == 0;
    options.write_zeros = false;
    options.paths.push_back({folder.path(), 0.3});
    const std::size_t said = FileTier::memory_bytes(options).value();
    const auto tier = FileTier::create(options);
    ASSERT_TRUE(tier.ok()) << tier.status();
    EXPECT_EQ((*tier)->allocated_bytes(), said);
    const std::int64_t slots = options.most_held + options.read_ahead + options.write_behind;
    EXPECT_LE(said, (*tier)->resident_records() * options.record_bytes +
                        static_cast<std::size_t>(slots) * (options.record_bytes + 4096) + 8 * 4096);
    const std::vector<std::int64_t> disk = FileTier::file_bytes(options).value();
    const std::int64_t stride = static_cast<std::int64_t>((options.record_bytes + 4095) / 4096 * 4096);
    EXPECT_EQ(disk[0] + disk[1], (options.records - (*tier)->resident_records()) * stride);
    const HostTierOptions host{.records = options.records, .record_bytes = options.record_bytes, .who = "test"};
    EXPECT_EQ(HostTier::create(host).value()->allocated_bytes(), HostTier::memory_bytes(host));
  }
}

/// Gives pages to a tier, and counts them.
struct GivenPages {
  AlignedMemory::Give give() {
    return [this](std::size_t bytes) {
      given += bytes;
      auto* const pages = static_cast<std::byte*>(std::aligned_alloc(4096, bytes));
      std::memset(pages, 0, bytes);
      return std::shared_ptr<std::byte>(pages, [this, bytes](std::byte* memory) {
        given -= bytes;
        std::free(memory);
      });
    };
  }
  std::size_t given = 0;
};

TEST(TierSizes, HostTiersRecordsMayDifferInSize) {
  GivenPages pages;
  {
    HostTierOptions options{.records = 3, .record_bytes = 5000, .who = "test"};
    options.sizes = {100, 5000, 64};
    options.give = pages.give();
    const auto tier = HostTier::create(options).value();
    EXPECT_EQ(HostTier::all_bytes(options), 128u + 5056 + 64);
    EXPECT_EQ(pages.given, 8192u);
    EXPECT_EQ(tier->record_memory_bytes(), pages.given);
    EXPECT_EQ(tier->allocated_bytes(), HostTier::memory_bytes(options));
    for (std::int64_t record = 0; record < 3; ++record) {
      const std::span<std::byte> bytes = tier->get(record).value();
      ASSERT_EQ(bytes.size(), options.sizes[static_cast<std::size_t>(record)]);
      std::memset(bytes.data(), static_cast<int>(record) + 1, bytes.size());
      ASSERT_TRUE(tier->put(record).ok());
    }
    for (std::int64_t record = 0; record < 3; ++record) {
      const std::span<std::byte> bytes = tier->get(record).value();
      EXPECT_TRUE(
          std::ranges::all_of(bytes, [&](std::byte byte) { return byte == static_cast<std::byte>(record + 1); }));
    }
    options.sizes[1] = 5001;
    EXPECT_EQ(exit_code_of(HostTier::create(options).status()), ExitCode::kInternal);
    options.sizes.pop_back();
    EXPECT_EQ(exit_code_of(HostTier::create(options).status()), ExitCode::kInternal);
  }
  EXPECT_EQ(pages.given, 0u);
}

TEST(TierSizes, FileTierUsesTheGivenAllocator) {
  ScratchFolder folder;
  GivenPages pages;
  {
    FileTierOptions options = small_tier(folder, 20);
    options.most_held = 3;
    options.resident_bytes = 2 * options.record_bytes;
    options.memory = pages.give();
    const auto tier = FileTier::create(options).value();
    EXPECT_EQ(tier->record_memory_bytes(), pages.given);
    EXPECT_GT(pages.given, 0u);
    Model model(*tier);
    for (std::uint64_t round = 1; round <= 2; ++round) {
      for (std::int64_t record = 0; record < 20; ++record) ASSERT_TRUE(model.update(record, round).ok());
    }
  }
  EXPECT_EQ(pages.given, 0u);
}

TEST(TierSizes, HostTierUsesGivenMemory) {
  alignas(64) static std::byte memory[4 * 128];
  std::memset(memory, 9, sizeof(memory));
  const HostTierOptions options{.records = 4, .record_bytes = 128, .who = "test", .memory = memory};
  const auto tier = HostTier::create(options).value();
  EXPECT_EQ(tier->get(2).value().data(), memory + 256);
  EXPECT_EQ(memory[256], std::byte{0});
  EXPECT_EQ(tier->allocated_bytes(), 4096u);
  EXPECT_EQ(
      exit_code_of(HostTier::create({.records = 5, .record_bytes = 128, .who = "test", .memory = memory}).status()),
      ExitCode::kInternal);
}

TEST(TierSizes, WrongOptionsAreRefused) {
  ScratchFolder folder;
  std::vector<FileTierOptions> wrong(14, small_tier(folder, 8));
  wrong[0].records = 0;
  wrong[1].record_bytes = 0;
  wrong[2].paths.clear();
  wrong[3].paths[0].weight = 0;
  wrong[4].paths[0].weight = std::nan("");
  wrong[5].most_held = 0;
  wrong[6].read_ahead = -1;
  wrong[7].write_behind = 65;
  wrong[8].records = std::int64_t{1} << 40;
  wrong[9].paths[0].directory = "";
  wrong[10].io.in_flight = 0;
  wrong[11].record_bytes = std::size_t{1} << 50;
  wrong[12].resident_first = 9;
  wrong[13].resident_first = -1;
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    const ExitCode wanted = i == 9 ? ExitCode::kConfig : ExitCode::kInternal;  // case 9: a strategy names that folder
    EXPECT_EQ(exit_code_of(FileTier::create(wrong[i]).status()), wanted) << i;
  }
}

TEST(TierSizes, FullyResidentTierMakesNoFile) {
  FileTierOptions options{.records = 4, .record_bytes = 4096, .who = "test", .resident_bytes = 4 * 4096};
  const auto tier = FileTier::create(options).value();
  Model model(*tier);
  for (std::int64_t i = 0; i < 4; ++i) ASSERT_TRUE(model.update(i, 1 + static_cast<std::uint64_t>(i)).ok());
  for (std::int64_t i = 0; i < 4; ++i) ASSERT_TRUE(model.update(i, 10).ok());
  EXPECT_TRUE(tier->flush().ok());
  EXPECT_EQ(tier->counters().writes, 0);
}

// ---- Traffic --------------------------------------------------------------------------------------------------------

// The disk reads and writes other records while records that stay in memory are used.
TEST(TierSizes, ResidentRecordsLieAnywhereAmongTheOthers) {
  ScratchFolder folder;
  FileTierOptions options = small_tier(folder, 40);
  options.resident_bytes = 30 * kRecordBytes;
  for (const std::int64_t first : {0, 24, 36}) {
    options.resident_first = first;
    const auto tier = FileTier::create(options).value();
    std::int64_t stay = 0, of_first = 0, longest = 0, run = 0;
    for (std::int64_t record = 0; record < 40; ++record) {
      const bool stays = tier->stays_in_memory(record);
      stay += stays ? 1 : 0;
      of_first += stays && record < first ? 1 : 0;
      run = stays ? run + 1 : 0;
      longest = std::max(longest, run);
    }
    EXPECT_EQ(stay, 30);
    EXPECT_EQ(of_first, std::min<std::int64_t>(first, 30));
    EXPECT_LE(longest, first == 0 ? 3 : first == 24 ? 24 : 5) << first;
    Model model(*tier);
    for (std::uint64_t round = 1; round <= 2; ++round) {
      for (std::int64_t record = 0; record < 40; ++record) ASSERT_TRUE(model.update(record, round * 100 + record).ok());
    }
    EXPECT_EQ(tier->counters().writes, 20);
  }
}

struct Traffic {
  std::int64_t records = 40, resident = 0;
  int most_held = 1, read_ahead = 4, write_behind = 3;
  std::int64_t slots() const { return most_held + read_ahead + write_behind; }
};

/// Visits the records as a step does, and reads as far in advance as the tier allows.
absl::Status traverse(Model& model, const Traffic& traffic, bool forward, std::uint64_t seed) {
  const auto at = [&](std::int64_t i) { return forward ? i : traffic.records - 1 - i; };
  for (std::int64_t i = 0; i < traffic.read_ahead; ++i)
    if (i < traffic.records) model.tier.fetch(at(i));
  for (std::int64_t i = 0; i < traffic.records; ++i) {
    TESSERA_RETURN_IF_ERROR(model.tier.get(at(i)).status());
    if (i + traffic.read_ahead < traffic.records) model.tier.fetch(at(i + traffic.read_ahead));
    TESSERA_RETURN_IF_ERROR(model.update(at(i), seed + static_cast<std::uint64_t>(i)));
  }
  return model.tier.flush();
}

class TrafficTest : public ::testing::TestWithParam<IoVariant> {};

// Every record on disk is read exactly once and written exactly once in a step, whatever is in flight.
TEST_P(TrafficTest, EachRecordIsReadAndWrittenOncePerStep) {
  for (const Traffic& traffic :
       {Traffic{}, Traffic{.resident = 10}, Traffic{.read_ahead = 0, .write_behind = 0},
        Traffic{.records = 41, .resident = 3, .most_held = 2, .read_ahead = 1, .write_behind = 1}}) {
    ScratchFolder folder;
    FileTierOptions options = small_tier(folder, traffic.records);
    options.write_zeros = false;
    options.most_held = traffic.most_held;
    options.read_ahead = traffic.read_ahead;
    options.write_behind = traffic.write_behind;
    options.resident_bytes = static_cast<std::size_t>(traffic.resident) * kRecordBytes;
    options.direct = GetParam().direct;
    options.io = GetParam().ring;
    const auto tier = FileTier::create(options).value();
    Model model(*tier);
    ASSERT_TRUE(traverse(model, traffic, true, 1).ok());
    const std::int64_t on_disk = traffic.records - traffic.resident;
    EXPECT_EQ(tier->counters().reads, 0);  // records that were never written are zeros, and need no read
    EXPECT_EQ(tier->counters().writes, on_disk);
    TierCounters before = tier->counters();
    for (std::uint64_t step = 2; step < 5; ++step) {
      const absl::Status status = traverse(model, traffic, true, step * 1000);
      ASSERT_TRUE(status.ok()) << status;
      const TierCounters now = tier->counters();
      EXPECT_EQ(now.writes - before.writes, on_disk);
      EXPECT_EQ(now.reads - before.reads, on_disk);
      EXPECT_EQ(now.bytes_read - before.bytes_read, on_disk * static_cast<std::int64_t>(kBlockBytes));
      EXPECT_EQ(now.bytes_written - before.bytes_written, on_disk * static_cast<std::int64_t>(kBlockBytes));
      EXPECT_EQ(now.gets - before.gets, 3 * traffic.records);  // `update` gets a record twice
      EXPECT_EQ(now.hits - before.hits, 3 * traffic.records - on_disk);
      before = now;
    }
  }
}

// Traversals go forward, then backward. Records that are still in slots are not read.
TEST_P(TrafficTest, AlternatingTraversalsReuseTheLastRecords) {
  for (const Traffic& traffic : {Traffic{}, Traffic{.resident = 10}, Traffic{.read_ahead = 2, .write_behind = 1}}) {
    ScratchFolder folder;
    FileTierOptions options = small_tier(folder, traffic.records);
    options.write_zeros = false;
    options.read_ahead = traffic.read_ahead;
    options.write_behind = traffic.write_behind;
    options.resident_bytes = static_cast<std::size_t>(traffic.resident) * kRecordBytes;
    options.direct = GetParam().direct;
    options.io = GetParam().ring;
    const auto tier = FileTier::create(options).value();
    Model model(*tier);
    ASSERT_TRUE(traverse(model, traffic, true, 1).ok());
    for (std::uint64_t step = 2; step < 8; ++step) {
      const TierCounters before = tier->counters();
      const bool forward = step % 2 == 1;
      const absl::Status status = traverse(model, traffic, forward, step * 1000);
      ASSERT_TRUE(status.ok()) << status;
      const std::int64_t on_disk = traffic.records - traffic.resident;
      EXPECT_EQ(tier->counters().reads - before.reads, on_disk - traffic.slots()) << step;
      EXPECT_EQ(tier->counters().writes - before.writes, on_disk) << step;
    }
  }
}

/// Fetches records from `next` on until there is no free slot. Returns the first record that was not fetched.
std::int64_t fetch_all(RecordTier& tier, std::int64_t next) {
  while (next < tier.num_records() && tier.fetch(next)) ++next;
  return next;
}

// A slot can be used for reads unless its record is held or is being written. At least `read_ahead` slots can always be
// used for reads.
TEST_P(TrafficTest, SlotsOfEndedWritesServeReads) {
  ScratchFolder folder;
  FileTierOptions options = small_tier(folder, 40);
  options.read_ahead = 3;
  options.write_behind = 4;
  options.io = GetParam().ring;
  options.direct = GetParam().direct;
  const auto tier = FileTier::create(options).value();
  Model model(*tier);
  for (std::int64_t i = 0; i < 40; ++i) ASSERT_TRUE(model.update(i, 1 + static_cast<std::uint64_t>(i)).ok());
  ASSERT_TRUE(tier->flush().ok());
  // The ring begins at most this many transfers without waiting, in addition to the writes.
  const std::int64_t most = std::min(7, std::max(3, GetParam().ring.in_flight - 4));
  EXPECT_EQ(fetch_all(*tier, 0), most);
  for (std::int64_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(model.look(i).ok());
    ASSERT_TRUE(tier->release(i).ok());
    EXPECT_EQ(fetch_all(*tier, i + 1), i + 1 + most) << "nothing is written";
  }
  EXPECT_EQ(tier->counters().reads, 20 + most);
  ScopedFaults faults({{.site = FaultSite::kWrite, .every = 1, .action = FaultAction::kDelay, .number = 50}});
  for (std::int64_t i = 20; i < 24; ++i) ASSERT_TRUE(model.update(i, 100).ok());
  std::int64_t next = fetch_all(*tier, 24);
  EXPECT_GE(next, 27) << "four are being written, and four are free, of which the next get has one";
  for (Deadline limit(std::chrono::seconds(20)); next < 24 + most && !limit.passed();) next = fetch_all(*tier, next);
  EXPECT_EQ(next, 24 + most) << "when the writes have ended";
  for (std::int64_t i = 24; i < next; ++i) {
    ASSERT_TRUE(model.look(i).ok());
    ASSERT_TRUE(tier->release(i).ok());
  }
}

// A step may update elements first, and then read the masters of matrices without changing them. Slots are reused in
// order, whether their records were put or released.
TEST_P(TrafficTest, LastReadRecordsAreFoundBehindWrites) {
  ScratchFolder folder;
  FileTierOptions options = small_tier(folder, 30);
  options.read_ahead = options.write_behind = 3;
  options.io = GetParam().ring;
  options.direct = GetParam().direct;
  const auto tier = FileTier::create(options).value();
  Model model(*tier);
  for (std::int64_t i = 0; i < 30; ++i) ASSERT_TRUE(model.update(i, 1).ok());
  for (std::int64_t i = 0; i < 10; ++i) ASSERT_TRUE(model.update(i, 2).ok());
  for (std::int64_t i = 10; i < 30; ++i) {
    fetch_all(*tier, i);
    ASSERT_TRUE(model.look(i).ok());
    ASSERT_TRUE(tier->release(i).ok());
  }
  const TierCounters before = tier->counters();
  for (std::int64_t i = 29; i >= 10; --i) ASSERT_TRUE(model.update(i, 3).ok());
  EXPECT_EQ(tier->counters().reads - before.reads, 20 - 7);
}

TEST_P(TrafficTest, WrongAdviceCostsOnlyReads) {
  ScratchFolder folder;
  FileTierOptions options = small_tier(folder, 30);
  options.io = GetParam().ring;
  options.direct = GetParam().direct;
  const auto tier = FileTier::create(options).value();
  Model model(*tier);
  for (std::int64_t i = 0; i < 30; ++i) ASSERT_TRUE(model.update(i, 1 + static_cast<std::uint64_t>(i)).ok());
  for (std::int64_t i = -3; i < 40; ++i) tier->fetch(i);
  for (std::int64_t i = 29; i >= 0; --i) ASSERT_TRUE(model.update(i, 100 + static_cast<std::uint64_t>(i)).ok());
  ASSERT_TRUE(tier->flush().ok());
  EXPECT_LE(tier->counters().reads, 30 + options.read_ahead + options.write_behind);
  // Records can be fetched in advance again after a flush.
  const TierCounters before = tier->counters();
  tier->fetch(29);
  tier->fetch(28);
  EXPECT_TRUE(model.update(29, 7).ok());
  EXPECT_TRUE(model.update(28, 7).ok());
  EXPECT_EQ(tier->counters().reads - before.reads, 2);
}

INSTANTIATE_TEST_SUITE_P(All, TrafficTest, ::testing::ValuesIn(io_variants()),
                         [](const auto& info) { return info.param.name; });

// ---- Faults ---------------------------------------------------------------------------------------------------------

class TierFaultTest : public ::testing::TestWithParam<IoVariant> {
 protected:
  FileTierOptions options(const ScratchFolder& folder) const {
    FileTierOptions options = small_tier(folder, 12);
    options.write_zeros = false;
    options.read_ahead = 2;
    options.write_behind = 2;
    options.direct = GetParam().direct;
    options.io = GetParam().ring;
    return options;
  }
  static constexpr Traffic kTraffic{.records = 12, .read_ahead = 2, .write_behind = 2};
};

// Faults F23, F24 and F44 (docs/faults.md): any read or write fails. The error is returned, names the record, and
// stays.
TEST_P(TierFaultTest, EveryFailedTransferIsAnErrorThatStays) {
  ScratchFolder folder;
  for (const FaultSite site : {FaultSite::kRead, FaultSite::kWrite, FaultSite::kCqe}) {
    for (std::int64_t n = 1;; ++n) {
      const auto tier = FileTier::create(options(folder)).value();
      Model model(*tier);
      ASSERT_TRUE(traverse(model, kTraffic, true, 1).ok());
      ScopedFaults faults({{.site = site, .nth = n, .action = FaultAction::kErrno, .number = EIO}});
      absl::Status status;
      for (std::uint64_t step = 2; step < 4 && status.ok(); ++step)
        status = traverse(model, kTraffic, true, step * 100);
      if (faults.plan().faults() == 0) {
        EXPECT_TRUE(status.ok()) << status;
        EXPECT_GE(n, 24);  // each transfer of two steps failed once
        break;
      }
      ASSERT_EQ(exit_code_of(status), ExitCode::kIo) << n << ": " << status;
      EXPECT_THAT(message_of(status),
                  AllOf(HasSubstr("record "), HasSubstr("(layers."), HasSubstr("rank 1 optimizer state"),
                        HasSubstr(folder.path()), HasSubstr("(errno 5)")));
      for (std::int64_t record = 0; record < 12; ++record) EXPECT_EQ(tier->get(record).status(), status);
      EXPECT_EQ(tier->flush(), status);
      EXPECT_EQ(tier->put(0), status);
    }
  }
}

// Fault F44 (docs/faults.md): a record with a flipped bit or after a torn transfer is never returned as good, whichever
// transfer has the fault.
TEST_P(TierFaultTest, WrongBytesAreNoticed) {
  ScratchFolder folder;
  for (const FaultRule& kind : {FaultRule{.site = FaultSite::kWrite, .action = FaultAction::kBitFlip, .number = 5000},
                                FaultRule{.site = FaultSite::kRead, .action = FaultAction::kBitFlip, .number = 9999},
                                FaultRule{.site = FaultSite::kWrite, .action = FaultAction::kTorn, .number = 1},
                                FaultRule{.site = FaultSite::kRead, .action = FaultAction::kTorn, .number = 2}}) {
    for (std::int64_t n = 1; n <= 12; ++n) {
      const auto tier = FileTier::create(options(folder)).value();
      Model model(*tier);
      ASSERT_TRUE(traverse(model, kTraffic, true, 1).ok());
      FaultRule rule = kind;
      rule.nth = n;
      ScopedFaults faults({rule});
      absl::Status status;
      for (std::uint64_t step = 2; step < 4 && status.ok(); ++step)
        status = traverse(model, kTraffic, true, step * 100);
      ASSERT_EQ(faults.plan().faults(), 1);
      ASSERT_EQ(exit_code_of(status), ExitCode::kCorruptData) << n << ": " << status;
      EXPECT_THAT(message_of(status), AllOf(HasSubstr("(layers."), HasSubstr(".weight)"), HasSubstr(folder.path()),
                                            HasSubstr("checksum"), HasSubstr("at offset ")));
      EXPECT_EQ(tier->get(0).status(), status);
    }
  }
}

// A tier without checksums does not notice a flipped bit. So the test above would fail without checksums.
TEST_P(TierFaultTest, FlippedBitIsReadWithoutVerify) {
  ScratchFolder folder;
  FileTierOptions unverified = options(folder);
  unverified.verify = false;
  const auto tier = FileTier::create(unverified).value();
  Model model(*tier);
  ASSERT_TRUE(traverse(model, kTraffic, true, 1).ok());
  ScopedFaults faults({{.site = FaultSite::kRead, .nth = 1, .action = FaultAction::kBitFlip, .number = 77}});
  EXPECT_THAT(message_of(traverse(model, kTraffic, true, 100)), HasSubstr("has wrong bytes"));
}

// Fault F46 (docs/faults.md): a slow disk costs time, and the time is counted.
TEST_P(TierFaultTest, SlowDiskCountsAsWaiting) {
  ScratchFolder folder;
  const auto tier = FileTier::create(options(folder)).value();
  Model model(*tier);
  ASSERT_TRUE(traverse(model, kTraffic, true, 1).ok());
  const double before = tier->counters().wait_seconds;
  ScopedFaults faults({{.site = FaultSite::kRead, .every = 1, .action = FaultAction::kDelay, .number = 20}});
  ASSERT_TRUE(traverse(model, kTraffic, true, 100).ok());
  EXPECT_GE(tier->counters().wait_seconds - before, 0.04);
}

INSTANTIATE_TEST_SUITE_P(All, TierFaultTest, ::testing::ValuesIn(io_variants()),
                         [](const auto& info) { return info.param.name; });

// Fault F43 (docs/faults.md): records have the same bytes if the system forbids io_uring.
TEST(TierFaults, BytesAreTheSameWithoutIoUring) {
  const ChildEnd end = in_child([] {
    if (!forbid_io_uring(EPERM)) return 99;
    ScratchFolder folder;
    const auto tier = FileTier::create(small_tier(folder, 12));
    if (!tier.ok()) return 1;
    if ((*tier)->describe().find("threads with pread and pwrite; because io_uring") == std::string::npos) return 2;
    Model model(**tier);
    for (std::uint64_t step = 1; step < 4; ++step)
      if (!traverse(model, {.records = 12}, step % 2 == 1, step * 100).ok()) return 3;
    return 0;
  });
  if (end.exit_code == 99) GTEST_SKIP() << "no seccomp here";
  EXPECT_EQ(end.exit_code, 0) << end.text;
}

// A full disk is an error when the tier is made, not in the first step. The space that the tier had taken by then is
// free again.
TEST(TierFaults, FullDiskIsAnErrorAtCreation) {
  const ChildEnd end = in_child([] {
    ScratchFolder folder;
    if (!enter_own_mounts() || !mount_tmpfs(folder.path(), "256k")) return 99;
    FileTierOptions options = small_tier(folder, 100);
    const absl::Status status = FileTier::create(options).status();
    if (exit_code_of(status) != ExitCode::kIo) return 1;
    const std::string text = message_of(status);
    if (text.find("wanted 1228800 bytes") == std::string::npos ||
        text.find("(262144 bytes free)") == std::string::npos || text.find("errno 28") == std::string::npos)
      return 2;
    options.records = 20;  // the records have 240 KiB in total
    return FileTier::create(options).ok() ? 0 : 3;
  });
  if (end.exit_code == 99) GTEST_SKIP() << "no right to mount here";
  EXPECT_EQ(end.exit_code, 0) << end.text;
}

}  // namespace
}  // namespace tessera
