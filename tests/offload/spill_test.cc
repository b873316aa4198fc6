// Tests the spill, which stores values of any size in a file: their bytes, the space that is used again, and faults of
// the disk.

#include "offload/spill.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "offload/files/fault_plan.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kPieceBytes = 10000;  // three blocks on disk, the last one not full

SpillOptions small_spill(const ScratchFolder& folder) {
  return {.who = "rank 1 activations",
          .directories = {folder.path()},
          .piece_bytes = kPieceBytes,
          .queue_depth = 2,
          .verify = true};
}

/// The values that a spill should hold, by id.
struct SpilledValues {
  explicit SpilledValues(Spill& spill) : spill(spill) {}

  static std::vector<std::byte> bytes_of(std::uint64_t seed, std::size_t bytes) {
    std::vector<std::byte> want(bytes);
    fill_pattern(want, seed);
    return want;
  }
  absl::Status put(std::uint64_t seed, std::size_t bytes) {
    std::vector<std::byte> memory = bytes_of(seed, bytes);
    TESSERA_ASSIGN_OR_RETURN(const Spill::Id id, spill.put(memory));
    std::ranges::fill(memory, std::byte{0xAA});  // the caller may free the memory when put returns
    values[id] = {seed, bytes};
    return absl::OkStatus();
  }
  absl::Status look(Spill::Id id) {
    const auto [seed, bytes] = values.at(id);
    std::vector<std::byte> got(bytes);
    TESSERA_RETURN_IF_ERROR(spill.get(id, got));
    if (got == bytes_of(seed, bytes)) return absl::OkStatus();
    return absl::InternalError("value " + std::to_string(id) + " has wrong bytes");
  }
  void drop(Spill::Id id) {
    spill.drop(id);
    values.erase(id);
  }
  /// Checks all values and drops them in the order of a backward: the last one first.
  absl::Status look_and_drop_all() {
    while (!values.empty()) {
      const Spill::Id id = values.rbegin()->first;
      TESSERA_RETURN_IF_ERROR(look(id));
      drop(id);
    }
    return absl::OkStatus();
  }

  Spill& spill;
  std::map<Spill::Id, std::pair<std::uint64_t, std::size_t>> values;
};

class SpillTest : public ::testing::TestWithParam<IoVariant> {
 protected:
  std::unique_ptr<Spill> make(SpillOptions options) const {
    options.direct = GetParam().direct;
    options.io = GetParam().ring;
    return Spill::create(std::move(options)).value();
  }
};

// Values of any size keep their bytes in any order of puts, gets and drops, whichever transfers are late.
TEST_P(SpillTest, ValuesKeepTheirBytesInAnyOrderOfCalls) {
  ScratchFolder folder;
  const FaultRule late_writes{.site = FaultSite::kWrite, .every = 3, .action = FaultAction::kDelay, .number = 2};
  const FaultRule late_reads{.site = FaultSite::kRead, .every = 4, .action = FaultAction::kDelay, .number = 1};
  for (const int depth : {1, 2, 5}) {
    const ScopedFaults late(depth == 2 ? std::vector{late_writes, late_reads} : std::vector<FaultRule>());
    SpillOptions options = small_spill(folder);
    options.queue_depth = depth;
    options.directories.push_back(folder.path());
    const auto spill = make(std::move(options));
    SpilledValues model(*spill);
    std::mt19937 random(static_cast<unsigned>(depth));
    const auto pick = [&] {
      return std::next(model.values.begin(), static_cast<std::ptrdiff_t>(random() % model.values.size()))->first;
    };
    for (std::uint64_t i = 0; i < 600; ++i) {
      const unsigned what = random() % 8;
      if (model.values.empty() || what < 3) {
        ASSERT_EQ(model.put(i, 1 + random() % (6 * kPieceBytes)), absl::OkStatus());
      } else if (what < 6) {
        ASSERT_EQ(model.look(pick()), absl::OkStatus());
      } else {
        model.drop(pick());
      }
    }
    ASSERT_EQ(model.look_and_drop_all(), absl::OkStatus());
    EXPECT_LE(spill->taken_bytes(), static_cast<std::int64_t>(spill->memory_bytes()));  // some transfers still run
  }
}

// Steps of the same shape use the same space in the file, and read only values that the slots no longer hold.
TEST_P(SpillTest, LaterStepsReuseTheRoom) {
  ScratchFolder folder;
  const auto spill = make(small_spill(folder));
  SpilledValues model(*spill);
  std::int64_t file_bytes = 0;
  for (int step = 0; step < 5; ++step) {
    for (std::uint64_t i = 0; i < 40; ++i) ASSERT_EQ(model.put(i, kPieceBytes * (1 + i % 3)), absl::OkStatus());
    ASSERT_EQ(model.look_and_drop_all(), absl::OkStatus());
    if (step == 1) file_bytes = spill->file_bytes();
    if (step > 1) {
      EXPECT_EQ(spill->file_bytes(), file_bytes);
    }
  }
  const TierCounters counters = spill->counters();
  EXPECT_EQ(counters.gets, 200);
  EXPECT_EQ(counters.writes, 5 * 79);
  EXPECT_LT(counters.reads, counters.writes);
  EXPECT_GE(counters.reads, counters.writes - 5 * 5);  // five slots a step need no read
}

// Values that were stored last are still in the slots.
TEST_P(SpillTest, ValuesStillInSlotsAreNotRead) {
  ScratchFolder folder;
  const auto spill = make(small_spill(folder));
  EXPECT_EQ(spill->memory_bytes(), Spill::memory_bytes(kPieceBytes, 2));
  EXPECT_EQ(spill->memory_bytes(), 5 * 12288U);
  EXPECT_EQ(spill->file_bytes(), 0);
  SpilledValues model(*spill);
  for (std::uint64_t i = 0; i < 5; ++i) ASSERT_EQ(model.put(i, kPieceBytes), absl::OkStatus());
  for (Spill::Id id = 4; id >= 0; --id) ASSERT_EQ(model.look(id), absl::OkStatus());
  EXPECT_EQ(spill->counters().reads, 0);
  EXPECT_EQ(spill->counters().hits, 5);
}

// If any operation fails, a value is read back correctly or not at all, and the first error stays.
TEST_P(SpillTest, EveryFaultIsAnErrorAndNeverWrongBytes) {
  struct Kind {
    FaultSite site;
    FaultAction action;
    std::int64_t number;
    const char* text;  ///< the error's text; null if the transfer is continued
  };
  const Kind kinds[] = {{FaultSite::kWrite, FaultAction::kErrno, EIO, "Input/output error (errno 5)"},
                        {FaultSite::kRead, FaultAction::kErrno, EIO, "Input/output error (errno 5)"},
                        {FaultSite::kWrite, FaultAction::kErrno, ENOSPC, "No space left on device (errno 28)"},
                        {FaultSite::kReserve, FaultAction::kErrno, ENOSPC, "No space left on device (errno 28)"},
                        {FaultSite::kRead, FaultAction::kBitFlip, 777, "was written"},
                        {FaultSite::kWrite, FaultAction::kTorn, 1, "was written"},
                        {FaultSite::kCqe, FaultAction::kErrno, EIO, "Input/output error (errno 5)"},
                        {FaultSite::kRead, FaultAction::kShort, 4096, nullptr},
                        {FaultSite::kWrite, FaultAction::kShort, 100, nullptr},
                        {FaultSite::kRead, FaultAction::kShort, 100, nullptr}};
  ScratchFolder folder;
  const auto run = [&]() -> absl::Status {
    SpillOptions options = small_spill(folder);
    options.direct = GetParam().direct;
    options.io = GetParam().ring;
    TESSERA_ASSIGN_OR_RETURN(const auto spill, Spill::create(std::move(options)));
    SpilledValues model(*spill);
    absl::Status status;
    for (std::uint64_t i = 0; i < 7 && status.ok(); ++i) status.Update(model.put(i, kPieceBytes * (1 + i % 3)));
    status.Update(model.look_and_drop_all());
    if (!status.ok()) {
      const std::vector<std::byte> more(10);
      EXPECT_EQ(spill->put(more).status(), status) << "the first error stays";
    }
    return status;
  };
  for (const Kind& kind : kinds) {
    std::int64_t operations = 0;
    {
      ScopedFaults counting({});
      ASSERT_EQ(run(), absl::OkStatus());
      operations = counting.plan().operations(kind.site);
    }
    ASSERT_GT(operations, 0);
    int failed = 0;
    for (std::int64_t nth = 1; nth <= operations; ++nth) {
      ScopedFaults failing({{.site = kind.site, .nth = nth, .action = kind.action, .number = kind.number}});
      const absl::Status status = run();
      if (status.ok()) continue;  // a retry helped (ring, O_DIRECT's first write), or nobody needed the read
      ++failed;
      ASSERT_NE(kind.text, nullptr) << status;
      EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 1 activations"), HasSubstr(kind.text))) << nth;
      EXPECT_THAT(message_of(status), HasSubstr(folder.path()));
    }
    if (kind.text) {
      EXPECT_GT(failed, 0) << kind.text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Io, SpillTest, ::testing::ValuesIn(io_variants()),
                         [](const auto& info) { return info.param.name; });

TEST(Spill, WrongOptionsAreRefused) {
  ScratchFolder folder;
  const auto refused = [&](const std::function<void(SpillOptions&)>& change) {
    SpillOptions options = small_spill(folder);
    change(options);
    return Spill::create(std::move(options)).status();
  };
  EXPECT_EQ(exit_code_of(refused([](SpillOptions& o) { o.piece_bytes = 0; })), ExitCode::kInternal);
  EXPECT_EQ(exit_code_of(refused([](SpillOptions& o) { o.queue_depth = 0; })), ExitCode::kInternal);
  EXPECT_EQ(exit_code_of(refused([](SpillOptions& o) { o.queue_depth = 33; })), ExitCode::kInternal);
  EXPECT_EQ(exit_code_of(refused([](SpillOptions& o) { o.directories = {}; })), ExitCode::kInternal);
  EXPECT_THAT(message_of(refused([](SpillOptions& o) { o.directories = {"/nowhere/at/all"}; })),
              HasSubstr("/nowhere/at/all"));
}

TEST(Spill, GetOfAMissingValueIsAnError) {
  ScratchFolder folder;
  const auto spill = Spill::create(small_spill(folder)).value();
  std::vector<std::byte> memory(1);
  EXPECT_THAT(message_of(spill->get(3, memory)), HasSubstr("value 3 is not there"));
}

TEST(ScratchRoom, AdjacentFreeStretchesAreJoined) {
  ScratchFolder folder;
  ScratchRoom room({.directory = folder.path(), .bytes = 0, .who = "test", .write_zeros = false}, 8 * 4096);
  std::vector<Room> taken;
  for (int i = 0; i < 8; ++i) taken.push_back(room.take(4096).value());
  EXPECT_EQ(room.file_bytes(), 8 * 4096);
  EXPECT_EQ(room.taken_bytes(), 8 * 4096);
  for (const std::size_t i : {3U, 5U, 4U, 7U, 0U, 6U, 1U, 2U}) room.give_back(taken[i]);
  EXPECT_EQ(room.taken_bytes(), 0);
  const Room all = room.take(std::size_t{8} * 4096).value();
  EXPECT_EQ(all.offset, 0);
  EXPECT_EQ(room.file_bytes(), 8 * 4096);
  const Room more = room.take(4096).value();  // the first file is full, so this space lies in another file
  EXPECT_EQ(room.file_bytes(), 16 * 4096);
  EXPECT_TRUE(room.holds(more));
  EXPECT_NE(more.file, all.file);
}

}  // namespace
}  // namespace tessera
