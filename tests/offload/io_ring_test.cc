// Tests the ring of disk transfers in all its variants: data, short and interrupted transfers, errors, retries and
// limits of the kernel.

#include "offload/io/io_ring.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <random>

#include "offload/files/aligned_memory.h"
#include "offload/files/sector.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"
#include "tests/support/limits/patience.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// A file, memory of twice its size, and a ring in which both are registered.
struct Disk {
  Disk(const IoVariant& variant, std::size_t bytes) {
    file = BlockFile::create({.directory = folder.path(),
                              .bytes = static_cast<std::int64_t>(bytes),
                              .who = "rank 0",
                              .direct = variant.direct})
               .value();
    memory = AlignedMemory::make(2 * bytes, "test").value();
    ring = IoRing::make(variant.ring).value();
    const BlockFile* const files[] = {file.get()};
    const std::span<std::byte> spans[] = {memory.span()};
    ring->register_resources(files, spans);
  }

  std::span<std::byte> first() { return memory.span().first(memory.bytes() / 2); }
  std::span<std::byte> second() { return memory.span().subspan(memory.bytes() / 2); }
  IoRequest write(std::size_t at, std::size_t bytes, std::uint64_t tag) {
    return {IoKind::kWrite,       file.get(), static_cast<std::int64_t>(at), first().data() + at, bytes,
            "rank 0 parameter w", tag};
  }
  IoRequest read(std::size_t at, std::size_t bytes, std::uint64_t tag) {
    return {IoKind::kRead,        file.get(), static_cast<std::int64_t>(at), second().data() + at, bytes,
            "rank 0 parameter w", tag};
  }

  ScratchFolder folder;
  std::unique_ptr<BlockFile> file;
  AlignedMemory memory;
  std::unique_ptr<IoRing> ring;
};

/// Writes `pieces` pieces of `bytes` bytes each, then reads them back into other memory.
absl::Status there_and_back(Disk& disk, std::size_t pieces, std::size_t bytes) {
  for (std::size_t i = 0; i < pieces; ++i) TESSERA_RETURN_IF_ERROR(disk.ring->submit(disk.write(i * bytes, bytes, i)));
  TESSERA_RETURN_IF_ERROR(disk.ring->drain());
  for (std::size_t i = 0; i < pieces; ++i) TESSERA_RETURN_IF_ERROR(disk.ring->submit(disk.read(i * bytes, bytes, i)));
  for (std::size_t i = 0; i < pieces; ++i) TESSERA_RETURN_IF_ERROR(disk.ring->wait(i));
  return absl::OkStatus();
}

class IoRingTest : public ::testing::TestWithParam<IoVariant> {};

// Pieces have random sizes and a random order, and there are many more than may be in flight.
TEST_P(IoRingTest, WrittenBytesAreReadBack) {
  Disk disk(GetParam(), 8 * kMiB);
  EXPECT_EQ(disk.file->direct(), GetParam().direct) << disk.file->mode();
  std::mt19937_64 random(17);
  std::vector<std::pair<std::size_t, std::size_t>> pieces;
  for (std::size_t at = 0; at < 8 * kMiB;) {
    const std::size_t bytes = std::min<std::size_t>((1 + random() % 24) * kSectorBytes, 8 * kMiB - at);
    pieces.emplace_back(at, bytes);
    at += bytes;
  }
  ASSERT_GT(pieces.size(), 100u);
  fill_pattern(disk.first(), 1);
  const std::uint64_t want = hash_of(disk.first());
  for (const bool is_write : {true, false}) {
    std::ranges::shuffle(pieces, random);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      const auto [at, bytes] = pieces[i];
      ASSERT_TRUE(disk.ring->submit(is_write ? disk.write(at, bytes, i) : disk.read(at, bytes, i)).ok());
      if (random() % 8 == 0) {
        ASSERT_TRUE(disk.ring->start().ok());
      }
      if (random() % 8 == 0) {
        ASSERT_TRUE(disk.ring->wait(random() % (i + 1)).ok());
      }
      if (random() % 8 == 0) {
        ASSERT_TRUE(disk.ring->poll().ok());
      }
    }
    ASSERT_TRUE(disk.ring->drain().ok());
  }
  EXPECT_EQ(hash_of(disk.second()), want);
  EXPECT_EQ(hash_of(disk.first()), want);
  EXPECT_EQ(disk.ring->counters().reads, static_cast<std::int64_t>(pieces.size()));
  EXPECT_EQ(disk.ring->counters().writes, static_cast<std::int64_t>(pieces.size()));
  EXPECT_EQ(disk.ring->counters().bytes_read, static_cast<std::int64_t>(8 * kMiB));
  EXPECT_EQ(disk.ring->counters().bytes_written, static_cast<std::int64_t>(8 * kMiB));
}

// Fault F25 (docs/faults.md): the kernel may shorten or interrupt any transfer, and the result is the same.
TEST_P(IoRingTest, ShortAndInterruptedTransfersAreContinued) {
  constexpr std::size_t kPieces = 6, kBytes = 3 * kSectorBytes;
  Disk disk(GetParam(), kPieces * kBytes);
  const std::vector<FaultRule> kinds = {
      {.site = FaultSite::kWrite, .action = FaultAction::kShort, .number = 1000},
      {.site = FaultSite::kWrite, .action = FaultAction::kShort, .number = 4096},
      {.site = FaultSite::kWrite, .action = FaultAction::kShort, .number = 0},
      {.site = FaultSite::kRead, .action = FaultAction::kShort, .number = 4097},
      {.site = FaultSite::kRead, .action = FaultAction::kShort, .number = 8192},
      {.site = FaultSite::kCqe, .action = FaultAction::kShort, .number = 513},
      {.site = FaultSite::kCqe, .action = FaultAction::kErrno, .number = EAGAIN},
      {.site = FaultSite::kCqe, .action = FaultAction::kErrno, .number = EINTR},
      {.site = FaultSite::kRead, .action = FaultAction::kErrno, .number = EAGAIN},
      {.site = FaultSite::kWrite, .action = FaultAction::kErrno, .number = EINTR},
      {.site = FaultSite::kSubmit, .action = FaultAction::kErrno, .number = EBUSY},
  };
  std::uint64_t seed = 100;
  for (const FaultRule& kind : kinds) {
    for (std::int64_t n = 1;; ++n) {
      FaultRule rule = kind;
      rule.nth = n;
      fill_pattern(disk.first(), ++seed);
      const std::uint64_t want = hash_of(disk.first());
      ScopedFaults faults({rule});
      const absl::Status status = there_and_back(disk, kPieces, kBytes);
      ASSERT_TRUE(status.ok()) << status << " fault " << n << " at site " << static_cast<int>(rule.site);
      ASSERT_EQ(hash_of(disk.second()), want) << "fault " << n << " at site " << static_cast<int>(rule.site);
      if (faults.plan().faults() == 0) {
        EXPECT_GT(n, static_cast<std::int64_t>(kPieces));  // each operation failed once
        break;
      }
    }
  }
  EXPECT_GT(disk.ring->counters().resumed, 0);
}

// Faults of all kinds occur in one run: at every second read and write, and at every third submission and completion.
TEST_P(IoRingTest, ManyFaultsAtOnceAreContinued) {
  constexpr std::size_t kPieces = 100, kBytes = 4 * kSectorBytes;
  Disk disk(GetParam(), kPieces * kBytes);
  fill_pattern(disk.first(), 5);
  const std::uint64_t want = hash_of(disk.first());
  ScopedFaults faults({{.site = FaultSite::kWrite, .every = 2, .action = FaultAction::kShort, .number = 5000},
                       {.site = FaultSite::kRead, .every = 2, .action = FaultAction::kShort, .number = 4096},
                       {.site = FaultSite::kSubmit, .every = 3, .action = FaultAction::kErrno, .number = EBUSY},
                       {.site = FaultSite::kCqe, .every = 3, .action = FaultAction::kErrno, .number = EAGAIN}});
  ASSERT_TRUE(there_and_back(disk, kPieces, kBytes).ok());
  EXPECT_EQ(hash_of(disk.second()), want);
  EXPECT_GT(faults.plan().faults(), 200);
}

// Faults F23 and F24 (docs/faults.md): an error ends only the request to which it belongs. Its message names rank,
// file, offset and bytes.
TEST_P(IoRingTest, ErrorNamesTheRankAndTheFile) {
  constexpr std::size_t kPieces = 5, kBytes = 2 * kSectorBytes;
  Disk disk(GetParam(), kPieces * kBytes);
  for (const FaultSite site : {FaultSite::kWrite, FaultSite::kCqe}) {
    for (const int error : {EIO, ENOSPC}) {
      for (std::size_t n = 1; n <= kPieces; ++n) {
        ScopedFaults faults(
            {{.site = site, .nth = static_cast<std::int64_t>(n), .action = FaultAction::kErrno, .number = error}});
        for (std::size_t i = 0; i < kPieces; ++i)
          ASSERT_TRUE(disk.ring->submit(disk.write(i * kBytes, kBytes, i)).ok());
        int failed = 0;
        for (std::size_t i = 0; i < kPieces; ++i) {
          const absl::Status status = disk.ring->wait(i);
          if (status.ok()) continue;
          ++failed;
          EXPECT_EQ(exit_code_of(status), ExitCode::kIo);
          EXPECT_THAT(message_of(status),
                      AllOf(HasSubstr("rank 0 parameter w: write of " + disk.folder.path()),
                            HasSubstr("at offset " + std::to_string(i * kBytes)), HasSubstr("wanted 8192 bytes, got 0"),
                            HasSubstr("(errno " + std::to_string(error) + ")"), HasSubstr("hint: ")));
          EXPECT_EQ(message_of(status).find(" bytes free") != std::string::npos, error == ENOSPC);
          EXPECT_TRUE(disk.ring->wait(i).ok()) << "reported twice";
        }
        EXPECT_EQ(failed, 1);
      }
    }
  }
}

TEST_P(IoRingTest, RetriesEndAfterABound) {
  Disk disk(GetParam(), kSectorBytes);
  for (const FaultRule& rule :
       {FaultRule{.site = FaultSite::kCqe, .every = 1, .action = FaultAction::kErrno, .number = EAGAIN},
        FaultRule{.site = FaultSite::kWrite, .every = 1, .action = FaultAction::kShort, .number = 0},
        FaultRule{.site = FaultSite::kSubmit, .every = 1, .action = FaultAction::kErrno, .number = EBUSY}}) {
    ScopedFaults faults({rule});
    const absl::Status submitted = disk.ring->submit(disk.write(0, kSectorBytes, 1));
    ASSERT_TRUE(submitted.ok()) << submitted;
    EXPECT_EQ(exit_code_of(disk.ring->wait(1)), ExitCode::kIo);
  }
}

// Fault F44 (docs/faults.md): the file was truncated while it was in use.
TEST_P(IoRingTest, TruncatedFileIsAnError) {
  Disk disk(GetParam(), 8 * kSectorBytes);
  ASSERT_EQ(::ftruncate(disk.file->buffered_fd(), 3 * kSectorBytes), 0);
  ASSERT_TRUE(disk.ring->submit(disk.read(0, 8 * kSectorBytes, 1)).ok());
  const absl::Status status = disk.ring->wait(1);
  EXPECT_EQ(exit_code_of(status), ExitCode::kIo);
  EXPECT_THAT(message_of(status), AllOf(HasSubstr("wanted 32768 bytes, got 12288"), HasSubstr("ended too early")));
}

// Fault F46 (docs/faults.md): slow requests end late, but they still overlap, and their time is counted.
TEST_P(IoRingTest, SlowTransfersOverlap) {
  constexpr std::size_t kPieces = 3;
  const double delay_s = patient_s(0.1);
  Disk disk(GetParam(), kPieces * kSectorBytes);
  ScopedFaults faults({{.site = FaultSite::kWrite,
                        .every = 1,
                        .action = FaultAction::kDelay,
                        .number = static_cast<int>(1000 * delay_s)}});
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < kPieces; ++i)
    ASSERT_TRUE(disk.ring->submit(disk.write(i * kSectorBytes, kSectorBytes, i)).ok());
  ASSERT_TRUE(disk.ring->drain().ok());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  EXPECT_GE(seconds, 0.99 * delay_s);
  EXPECT_LT(seconds, 2.9 * delay_s);
  EXPECT_GE(disk.ring->counters().wait_seconds, 0.9 * delay_s);
}

TEST_P(IoRingTest, RefusedDirectTransfersAreRepeatedBuffered) {
  Disk disk(GetParam(), 4 * kSectorBytes);
  for (std::int64_t n = 1; n <= 8; ++n) {
    fill_pattern(disk.first(), static_cast<std::uint64_t>(n));
    ScopedFaults faults({{.site = FaultSite::kCqe, .nth = n, .action = FaultAction::kErrno, .number = EINVAL}});
    const absl::Status status = there_and_back(disk, 4, kSectorBytes);
    ASSERT_EQ(faults.plan().faults(), 1);
    if (!GetParam().direct) {  // EINVAL has another cause with the page cache
      EXPECT_EQ(exit_code_of(status), ExitCode::kIo);
      continue;
    }
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(hash_of(disk.second()), hash_of(disk.first()));
  }
}

TEST_P(IoRingTest, InvalidRequestsAreRefused) {
  Disk disk(GetParam(), 4 * kSectorBytes);
  std::vector<IoRequest> wrong(8, disk.write(0, kSectorBytes, 1));
  wrong[0].offset = 512;
  wrong[1].memory += 512;
  wrong[2].bytes = 512;
  wrong[3].bytes = 0;
  wrong[4].bytes = 8 * kSectorBytes;
  wrong[5].offset = 4 * kSectorBytes;
  wrong[6].file = nullptr;
  wrong[7].offset = -4096;
  for (const IoRequest& request : wrong) EXPECT_EQ(exit_code_of(disk.ring->submit(request)), ExitCode::kInternal);
  EXPECT_TRUE(disk.ring->drain().ok());
  ASSERT_TRUE(disk.ring->submit(disk.write(0, kSectorBytes, 1)).ok());
  absl::Status other;
  std::thread([&] { other = disk.ring->wait(1); }).join();
  EXPECT_EQ(exit_code_of(other), ExitCode::kInternal);
  EXPECT_TRUE(disk.ring->wait(1).ok());
}

// The ring may be made on another thread than the thread that uses it.
TEST_P(IoRingTest, FirstSubmittingThreadOwnsTheRing) {
  Disk disk(GetParam(), 4 * kSectorBytes);
  fill_pattern(disk.first(), 3);
  absl::Status status;
  std::thread([&] {
    status = there_and_back(disk, 4, kSectorBytes);
    disk.ring.reset();
  }).join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(hash_of(disk.second()), hash_of(disk.first()));
}

INSTANTIATE_TEST_SUITE_P(All, IoRingTest, ::testing::ValuesIn(io_variants()),
                         [](const auto& info) { return info.param.name; });

TEST(IoRing, OptionsOutOfRangeAreRefused) {
  for (const IoRingOptions& options :
       {IoRingOptions{.in_flight = 0}, IoRingOptions{.in_flight = 65}, IoRingOptions{.queue_entries = 0},
        IoRingOptions{.queue_entries = 5000}, IoRingOptions{.threads = 0}, IoRingOptions{.threads = 65}})
    EXPECT_EQ(exit_code_of(IoRing::make(options).status()), ExitCode::kInternal);
}

// Fault F43 (docs/faults.md): the child is like a container that forbids io_uring.
TEST(IoRing, ForbiddenIoUringFallsBackToThreads) {
  for (const int error : {EPERM, ENOSYS}) {
    const ChildEnd end = in_child([&] {
      if (!forbid_io_uring(error)) return 99;
      const auto forced = IoRing::make({.engine = IoEngine::kUring});
      if (exit_code_of(forced.status()) != ExitCode::kUnavailable) return 1;
      const IoVariant variant{"", {}, true};
      Disk disk(variant, 8 * kSectorBytes);
      if (disk.ring->describe().find("4 threads with pread and pwrite; because io_uring") == std::string::npos)
        return 2;
      fill_pattern(disk.first(), 4);
      if (!there_and_back(disk, 8, kSectorBytes).ok()) return 3;
      if (hash_of(disk.first()) != hash_of(disk.second())) return 4;
      return IoRing::make({}).ok() ? 0 : 5;
    });
    if (end.exit_code == 99) GTEST_SKIP() << "no seccomp here";
    EXPECT_EQ(end.exit_code, 0) << end.text;
    const std::string cause = "(errno " + std::to_string(error) + ")";
    const std::size_t warned = end.text.find(cause);
    EXPECT_NE(warned, std::string::npos) << end.text;
    EXPECT_EQ(end.text.find(cause, warned + 1), std::string::npos) << "warned twice: " << end.text;
    EXPECT_THAT(end.text, AllOf(HasSubstr("warning"), HasSubstr("hint: allow io_uring_setup")));
  }
}

TEST(IoRing, LittleLockedMemoryFallsBackToUnregisteredBuffers) {
  const ChildEnd end = in_child([] {
    if (!lower_locked_memory(64 << 10)) return 99;
    const IoVariant variant{"", {.engine = IoEngine::kUring}, true};
    Disk disk(variant, 4 * kMiB);
    if (disk.ring->describe().find("not registered: memory: Cannot allocate memory") == std::string::npos) return 2;
    fill_pattern(disk.first(), 4);
    if (!there_and_back(disk, 4, kMiB).ok()) return 3;
    return hash_of(disk.first()) == hash_of(disk.second()) ? 0 : 4;
  });
  if (end.exit_code == 99) GTEST_SKIP() << "limits cannot be lowered here";
  EXPECT_EQ(end.exit_code, 0) << end.text;
  EXPECT_THAT(end.text, HasSubstr("hint: raise the limit of locked memory"));
}

}  // namespace
}  // namespace tessera
