// Tests how a tier's scratch file is made. Nothing is left behind, and each failure is an error with a remedy.

#include "offload/files/block_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <vector>

#include "offload/files/fault_plan.h"
#include "offload/files/scratch_directory.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr std::int64_t kBytes = 40960;

absl::Status create(const std::string& directory, std::int64_t bytes = kBytes) {
  return BlockFile::create({.directory = directory, .bytes = bytes, .who = "rank 2 optimizer state"}).status();
}

TEST(BlockFile, FileIsPrivateZeroedAndFullyAllocated) {
  for (const bool direct : {true, false}) {
    for (const bool write_zeros : {true, false}) {
      ScratchFolder folder;
      const auto file = BlockFile::create({.directory = folder.path(),
                                           .bytes = kBytes,
                                           .who = "rank 0",
                                           .direct = direct,
                                           .write_zeros = write_zeros})
                            .value();
      EXPECT_THAT(folder.names(), IsEmpty());
      struct stat info {};
      ASSERT_EQ(::fstat(file->buffered_fd(), &info), 0);
      EXPECT_EQ(info.st_nlink, 0u);
      EXPECT_EQ(info.st_mode & 07777, 0600u);
      EXPECT_EQ(info.st_size, kBytes);
      EXPECT_GE(info.st_blocks * 512, kBytes);
      EXPECT_EQ(::fcntl(file->fd(), F_GETFD), FD_CLOEXEC);
      EXPECT_EQ((::fcntl(file->fd(), F_GETFL) & O_DIRECT) != 0, file->direct());
      EXPECT_EQ(::fcntl(file->buffered_fd(), F_GETFL) & O_DIRECT, 0);
      std::vector<char> content(kBytes, 'x');
      ASSERT_EQ(::pread(file->buffered_fd(), content.data(), content.size(), 0), kBytes);
      EXPECT_TRUE(std::ranges::all_of(content, [](char c) { return c == 0; }));
    }
  }
}

TEST(BlockFile, NothingIsLeftAfterAnEndOrAKill) {
  ScratchFolder folder;
  { const auto file = BlockFile::create({.directory = folder.path(), .bytes = kBytes, .who = "rank 0"}).value(); }
  const ChildEnd end = in_child([&] {
    const auto file = BlockFile::create({.directory = folder.path(), .bytes = kBytes, .who = "rank 0"});
    if (!file.ok()) return 1;
    return ::raise(SIGKILL);
  });
  EXPECT_EQ(end.signal, SIGKILL);
  EXPECT_THAT(folder.names(), IsEmpty());
}

// Some file systems (NFS) do not support files without names. A scratch file on them has a name for a moment.
TEST(BlockFile, NameIsRemovedWhereUnnamedFilesAreUnsupported) {
  ScratchFolder folder;
  ScopedFaults faults({{.site = FaultSite::kOpen, .nth = 1, .action = FaultAction::kErrno, .number = EOPNOTSUPP}});
  const auto file = BlockFile::create({.directory = folder.path(), .bytes = kBytes, .who = "rank 0"});
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(folder.names(), IsEmpty());
  EXPECT_EQ(faults.plan().operations(FaultSite::kUnlink), 1);
  struct stat info {};
  ASSERT_EQ(::fstat((*file)->fd(), &info), 0);
  EXPECT_EQ(info.st_nlink, 0u);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
}

// If anything fails while a file is made, either an error says so, or the file works. A name is never left over.
TEST(BlockFile, EveryFaultAtCreationIsAnErrorAndLeavesNoName) {
  ScratchFolder folder;
  for (const bool named : {false, true}) {
    for (const FaultSite site : {FaultSite::kOpen, FaultSite::kReserve, FaultSite::kWrite, FaultSite::kUnlink}) {
      for (std::int64_t n = 1;; ++n) {
        std::vector<FaultRule> rules = {{.site = site, .nth = n, .action = FaultAction::kErrno, .number = EIO}};
        if (named)
          rules.push_back({.site = FaultSite::kOpen, .nth = 1, .action = FaultAction::kErrno, .number = EOPNOTSUPP});
        ScopedFaults faults(rules);
        const absl::Status status = create(folder.path());
        EXPECT_THAT(folder.names(), IsEmpty());
        if (faults.plan().faults() == (named ? 1 : 0)) break;
        if (named && site == FaultSite::kOpen && n == 1) continue;  // the first open fails with EIO
        EXPECT_EQ(exit_code_of(status), ExitCode::kIo);
        EXPECT_THAT(message_of(status),
                    AllOf(HasSubstr("rank 2 optimizer state: "), HasSubstr(folder.path()), HasSubstr("(errno 5)")));
        ASSERT_LT(n, 20);
      }
    }
  }
}

// Fault F25 (docs/faults.md): the faults occur while zeros are written.
TEST(BlockFile, ShortAndInterruptedWritesOfZerosAreContinued) {
  ScratchFolder folder;
  for (const FaultRule& kind : {FaultRule{.action = FaultAction::kShort, .number = 1000},
                                FaultRule{.action = FaultAction::kErrno, .number = EINTR}}) {
    for (std::int64_t n = 1; n <= 3; ++n) {
      FaultRule rule = kind;
      rule.site = FaultSite::kWrite;
      rule.nth = n;
      ScopedFaults faults({rule});
      const auto file =
          BlockFile::create({.directory = folder.path(), .bytes = kBytes, .who = "rank 0", .direct = false});
      ASSERT_TRUE(file.ok()) << file.status();
      struct stat info {};
      ASSERT_EQ(::fstat((*file)->fd(), &info), 0);
      EXPECT_EQ(info.st_size, kBytes);
    }
  }
}

TEST(BlockFile, FailedSyncIsNotTriedAgain) {
  ScratchFolder folder;
  const auto file = BlockFile::create({.directory = folder.path(), .bytes = kBytes, .who = "rank 0"});
  ASSERT_TRUE(file.ok()) << file.status();
  ScopedFaults faults({{.site = FaultSite::kFsync, .nth = 1, .action = FaultAction::kErrno, .number = EINTR}});
  EXPECT_EQ(exit_code_of((*file)->sync("rank 0")), ExitCode::kIo);
  EXPECT_EQ(faults.plan().operations(FaultSite::kFsync), 1);
}

// Fault F43 (docs/faults.md): O_DIRECT is missing. Either the open or the first write shows this.
TEST(BlockFile, WithoutDirectTransfersThePageCacheIsUsed) {
  ScratchFolder folder;
  for (const FaultRule& rule :
       {FaultRule{.site = FaultSite::kOpen, .nth = 2, .action = FaultAction::kErrno, .number = EINVAL},
        FaultRule{.site = FaultSite::kWrite, .nth = 1, .action = FaultAction::kErrno, .number = EINVAL}}) {
    ScopedFaults faults({rule});
    const auto file = BlockFile::create({.directory = folder.path(), .bytes = kBytes, .who = "rank 0"});
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_FALSE((*file)->direct());
    EXPECT_EQ((*file)->fd(), (*file)->buffered_fd());
    EXPECT_THAT((*file)->mode(), HasSubstr("with O_DIRECT failed: Invalid argument (errno 22)"));
  }
}

// This test covers fault F28 (docs/faults.md).
TEST(BlockFile, BadDirectoriesAreRefused) {
  ScratchFolder folder;
  std::ofstream(folder.file("file")) << "x";
  EXPECT_EQ(exit_code_of(create("")), ExitCode::kConfig);
  const absl::Status missing = create(folder.file("missing"));
  EXPECT_EQ(exit_code_of(missing), ExitCode::kCannotCreate);
  EXPECT_THAT(message_of(missing),
              AllOf(HasSubstr(folder.file("missing")), HasSubstr("hint: create its folder first")));
  EXPECT_EQ(exit_code_of(create(folder.file("file"))), ExitCode::kCannotCreate);
  EXPECT_EQ(exit_code_of(create(folder.file(std::string(300, 'n')))), ExitCode::kCannotCreate);
  EXPECT_EQ(exit_code_of(create(folder.path(), 1000)), ExitCode::kInternal);
  EXPECT_EQ(exit_code_of(create(folder.path(), 0)), ExitCode::kInternal);
}

// Fault F44 (docs/faults.md): the directory vanishes between the check and the open.
TEST(BlockFile, VanishedDirectoryIsAnError) {
  ScratchFolder folder;
  ScopedFaults faults({{.site = FaultSite::kOpen, .nth = 1, .action = FaultAction::kErrno, .number = ENOENT}});
  EXPECT_EQ(exit_code_of(create(folder.path())), ExitCode::kCannotCreate);
}

/// Checks that `create` fails in a child process in which `prepare` has caused the failure.
void expect_in_child(const ScratchFolder& folder, ExitCode want, const std::string& text,
                     const std::function<bool()>& prepare) {
  const ChildEnd end = in_child([&] {
    if (!prepare()) return 99;
    const absl::Status status = create(folder.path());
    std::fputs((message_of(status) + "\n").c_str(), stderr);
    return static_cast<int>(exit_code_of(status));
  });
  if (end.exit_code == 99) GTEST_SKIP() << "not allowed here";
  EXPECT_EQ(end.exit_code, static_cast<int>(want)) << end.text;
  EXPECT_THAT(end.text, HasSubstr(text));
}

TEST(BlockFile, NoPermissionIsAnError) {
  ScratchFolder folder;
  ASSERT_EQ(::chmod(folder.path().c_str(), 0500), 0);
  expect_in_child(folder, ExitCode::kPermission, "(errno 13)", become_nobody);
}

TEST(BlockFile, TooManyOpenFilesIsAnError) {
  ScratchFolder folder;
  expect_in_child(folder, ExitCode::kOsResource, "(errno 24). [T0394] hint: raise the limit of open files", [] {
    const rlimit limit{3, 3};
    return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
  });
}

TEST(BlockFile, FileSizeLimitIsAnErrorAndNoSignal) {
  ScratchFolder folder;
  expect_in_child(
      folder, ExitCode::kIo,
      "File too large (errno 27). [T0399] hint: raise the limit of file sizes (ulimit -f), which is 8.00 KiB here", [] {
        const rlimit limit{8192, 8192};
        return ::setrlimit(RLIMIT_FSIZE, &limit) == 0;
      });
}

TEST(BlockFile, ReadOnlyFileSystemIsAnError) {
  ScratchFolder folder;
  expect_in_child(folder, ExitCode::kCannotCreate, "mounted read-only", [&] {
    return enter_own_mounts() && ::mount("tessera", folder.path().c_str(), "tmpfs", MS_RDONLY, nullptr) == 0;
  });
}

// Fault F22 (docs/faults.md): the file system is really full. The error says how many bytes are wanted and how many are
// free. If the directory is in memory, the error says so.
TEST(BlockFile, FullFileSystemIsAnErrorAtOnce) {
  ScratchFolder folder;
  expect_in_child(folder, ExitCode::kIo, "(16384 bytes free): wanted 40960 bytes: No space left on device (errno 28)",
                  [&] { return enter_own_mounts() && mount_tmpfs(folder.path(), "16k"); });
  expect_in_child(folder, ExitCode::kOk, "is a tmpfs: what is offloaded there stays in memory",
                  [&] { return enter_own_mounts() && mount_tmpfs(folder.path(), "1m"); });
}

TEST(ScratchDirectory, ReportsWhetherItIsInMemory) {
  ScratchFolder folder;
  EXPECT_FALSE(look_at_scratch_directory(folder.path(), "rank 0").value().in_memory);
  const auto shm = look_at_scratch_directory("/dev/shm", "rank 0");
  if (!shm.ok()) GTEST_SKIP() << "no /dev/shm here";
  EXPECT_TRUE(shm->in_memory);
}

}  // namespace
}  // namespace tessera
