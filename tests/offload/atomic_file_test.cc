// Tests files that are replaced as a whole: after any fault or crash, either the old file or the new one exists.

#include "offload/files/atomic_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "offload/files/fault_plan.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const std::string kOld(3000, 'o');
const std::string kNew(100000, 'n');
constexpr FaultSite kSites[] = {FaultSite::kOpen, FaultSite::kWrite, FaultSite::kFsync, FaultSite::kRename};

absl::Status write(const std::string& path, const std::string& text) {
  return write_file_atomically(path, std::as_bytes(std::span(text)), "rank 0 manifest");
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(AtomicFile, WritesAndReplaces) {
  ScratchFolder folder;
  const std::string path = folder.file("manifest.json");
  for (const std::string& text : {kOld, std::string(), kNew}) {
    ASSERT_TRUE(write(path, text).ok());
    EXPECT_EQ(content_of(path), text);
    EXPECT_THAT(folder.names(), ElementsAre("manifest.json"));
  }
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  ASSERT_TRUE(write_file_atomically(path, {}, "test", 0644).ok());
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0644u);
}

// The folder that a user named may be a link. A folder in it may not.
TEST(AtomicFile, LinkBelowTheUsersFolderIsNotFollowed) {
  ScratchFolder folder, other;
  std::filesystem::create_directory(other.file("own"));
  std::filesystem::create_directory_symlink(std::filesystem::absolute(other.path()), folder.file("named"));
  std::filesystem::create_directory_symlink("own", other.file("link"));
  const auto write_below = [&](const std::string& path, int parts) {
    return write_file_atomically(FilePlace(folder.file(path), parts), std::as_bytes(std::span(kNew)), "test");
  };
  EXPECT_TRUE(write_below("named/a", 1).ok());
  EXPECT_TRUE(write_below("named/own/a", 2).ok());
  EXPECT_TRUE(write_below("named/link/b", 1).ok()) << "the user named the link";
  EXPECT_EQ(content_of(other.file("own/b")), kNew);
  const absl::Status refused = write_below("named/link/c", 2);
  EXPECT_EQ(exit_code_of(refused), ExitCode::kCannotCreate);
  EXPECT_THAT(message_of(refused), HasSubstr("one stands where none is followed"));
  EXPECT_FALSE(std::filesystem::exists(other.file("own/c")));
}

TEST(AtomicFile, LinkIsReplacedAndNotFollowed) {
  ScratchFolder folder;
  std::ofstream(folder.file("secret")) << "s";
  std::filesystem::create_symlink(folder.file("secret"), folder.file("link"));
  ASSERT_TRUE(write(folder.file("link"), kNew).ok());
  EXPECT_EQ(content_of(folder.file("secret")), "s");
  EXPECT_FALSE(std::filesystem::is_symlink(folder.file("link")));
}

TEST(AtomicFile, RelativePathIsTakenFromTheCurrentFolder) {
  const std::string name = "atomic-" + std::to_string(::getpid());
  ASSERT_TRUE(write(name, kNew).ok());
  EXPECT_EQ(content_of(name), kNew);
  ::unlink(name.c_str());
}

// Faults F22 and F23 (docs/faults.md): any operation fails. The file is whole, the error names the operation, and
// nothing is left over.
TEST(AtomicFile, EveryFaultLeavesTheOldFileOrTheNewOne) {
  for (const bool had_old : {true, false}) {
    for (const FaultSite site : kSites) {
      for (const int error : {EIO, ENOSPC, EMFILE}) {
        for (std::int64_t n = 1;; ++n) {
          ScratchFolder folder;
          const std::string path = folder.file("manifest.json");
          if (had_old) {
            ASSERT_TRUE(write(path, kOld).ok());
          }
          ScopedFaults faults({{.site = site, .nth = n, .action = FaultAction::kErrno, .number = error}});
          const absl::Status status = write(path, kNew);
          if (faults.plan().faults() == 0) {
            EXPECT_TRUE(status.ok());
            EXPECT_GT(n, 1);
            break;
          }
          EXPECT_FALSE(status.ok());
          EXPECT_EQ(exit_code_of(status), error == EMFILE ? ExitCode::kOsResource : ExitCode::kIo);
          EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 0 manifest: "), HasSubstr(path), HasSubstr("hint: "),
                                                HasSubstr("(errno " + std::to_string(error) + ")")));
          EXPECT_EQ(message_of(status).find(" bytes free)") != std::string::npos, error == ENOSPC);
          // If only the sync of the folder failed, the new file exists.
          const bool is_folder = message_of(status).find("of the folder") != std::string::npos;
          EXPECT_EQ(content_of(path), is_folder ? kNew : had_old ? kOld : "");
          EXPECT_EQ(folder.names().size(), had_old || is_folder ? 1u : 0u);
        }
      }
    }
  }
}

// A file that could be begun needs no more descriptors for its rename and for the sync of its folder.
TEST(AtomicFile, LimitOfDescriptorsIsMetBeforeTheFirstByteIsWritten) {
  for (const int parts : {1, 2}) {
    for (int more = 0; more < 4; ++more) {
      ScratchFolder folder;
      std::filesystem::create_directory(folder.file("own"));
      const std::string path = folder.file("own/manifest.json");
      ASSERT_TRUE(write(path, kOld).ok());
      absl::Status status;
      {
        const FewDescriptors few(more);
        status = write_file_atomically(FilePlace(path, parts), std::as_bytes(std::span(kNew)), "test");
      }
      EXPECT_EQ(status.ok(), more >= 2) << status << ", " << parts << " parts, " << more << " descriptors";
      EXPECT_EQ(content_of(path), status.ok() ? kNew : kOld);
      EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.file("own")), {}), 1);
      if (status.ok()) continue;
      EXPECT_EQ(exit_code_of(status), ExitCode::kOsResource);
      EXPECT_THAT(message_of(status), AllOf(HasSubstr("create of"), HasSubstr("hint: raise the limit of open files")));
    }
  }
}

TEST(AtomicFile, FailedSyncIsNotTriedAgain) {
  ScratchFolder folder;
  ScopedFaults faults({{.site = FaultSite::kFsync, .nth = 1, .action = FaultAction::kErrno, .number = EINTR}});
  EXPECT_FALSE(write(folder.file("x"), kNew).ok());
  EXPECT_EQ(faults.plan().operations(FaultSite::kFsync), 1);
  EXPECT_EQ(faults.plan().operations(FaultSite::kRename), 0);
  EXPECT_THAT(folder.names(), IsEmpty());
}

// This test covers fault F25 (docs/faults.md).
TEST(AtomicFile, ShortAndInterruptedCallsAreContinued) {
  for (const FaultRule& kind :
       {FaultRule{.site = FaultSite::kWrite, .action = FaultAction::kShort, .number = 999},
        FaultRule{.site = FaultSite::kWrite, .action = FaultAction::kErrno, .number = EINTR},
        FaultRule{.site = FaultSite::kOpen, .action = FaultAction::kErrno, .number = EINTR},
        FaultRule{.site = FaultSite::kWrite, .action = FaultAction::kErrno, .number = EAGAIN}}) {
    for (std::int64_t n = 1; n <= 2; ++n) {
      ScratchFolder folder;
      FaultRule rule = kind;
      rule.nth = n;
      ScopedFaults faults({rule});
      ASSERT_TRUE(write(folder.file("x"), kNew).ok());
      EXPECT_EQ(content_of(folder.file("x")), kNew);
    }
  }
  ScratchFolder folder;
  ScopedFaults faults({{.site = FaultSite::kWrite, .every = 1, .action = FaultAction::kShort, .number = 999}});
  ASSERT_TRUE(write(folder.file("x"), kNew).ok());
  EXPECT_EQ(faults.plan().operations(FaultSite::kWrite), 101);
  EXPECT_EQ(content_of(folder.file("x")), kNew);
}

/// Lets a child process write the new file over the old file, with one rule for faults. Checks that the file is whole,
/// and returns the child's exit code.
int write_in_child(const ScratchFolder& folder, const FaultRule& rule) {
  const std::string path = folder.file("manifest.json");
  EXPECT_TRUE(write(path, kOld).ok());
  const ChildEnd end = in_child([&] {
    ScopedFaults faults({rule});
    if (!write(path, kNew).ok()) return 1;
    return faults.plan().faults() == 0 ? 0 : 2;
  });
  const std::string content = content_of(path);
  EXPECT_TRUE(content == kOld || content == kNew)
      << content.size() << " bytes after site " << static_cast<int>(rule.site) << " operation " << rule.nth;
  EXPECT_TRUE(end.exit_code != 0 || content == kNew);
  return end.exit_code;
}

// Faults F2 and F26 (docs/faults.md): the process is killed or the machine loses power at any operation. Renames that
// were not synced may exist or not after a power loss.
TEST(AtomicFile, AnyCrashLeavesTheOldFileOrTheNewOne) {
  for (const FaultRule& kind : {FaultRule{.action = FaultAction::kCrash, .number = 137},
                                FaultRule{.action = FaultAction::kDropUnsynced, .keep_renames = false},
                                FaultRule{.action = FaultAction::kDropUnsynced, .keep_renames = true}}) {
    for (const FaultSite site : kSites) {
      std::int64_t n = 1;
      for (;; ++n) {
        ScratchFolder folder;
        FaultRule rule = kind;
        rule.site = site;
        rule.nth = n;
        const int code = write_in_child(folder, rule);
        if (code == 0) break;
        EXPECT_EQ(code, 137);
        // The files that the kill left behind do not prevent the next write.
        EXPECT_TRUE(write(folder.file("manifest.json"), kNew).ok());
        EXPECT_EQ(content_of(folder.file("manifest.json")), kNew);
      }
      EXPECT_GT(n, 1);
    }
  }
}

// A simulated power loss removes data that were not synced. So the test above would fail if a sync were missing.
TEST(AtomicFile, PowerLossEmptiesAFileThatWasNotSynced) {
  ScratchFolder folder;
  const std::string path = folder.file("manifest.json");
  ASSERT_TRUE(write(path, kOld).ok());
  // The first sync claims success without doing anything. The power fails at the second sync, which syncs the folder.
  const ChildEnd end = in_child([&] {
    ScopedFaults faults(
        {{.site = FaultSite::kFsync, .nth = 1, .action = FaultAction::kTorn},
         {.site = FaultSite::kFsync, .nth = 2, .action = FaultAction::kDropUnsynced, .keep_renames = true}});
    return write(path, kNew).ok() ? 0 : 1;
  });
  EXPECT_EQ(end.exit_code, 137);
  EXPECT_EQ(content_of(path), "");
}

TEST(AtomicFile, BadPathsAreRefused) {
  ScratchFolder folder;
  EXPECT_EQ(exit_code_of(write("", kNew)), ExitCode::kConfig);
  EXPECT_EQ(exit_code_of(write(folder.file("missing/x"), kNew)), ExitCode::kCannotCreate);
  EXPECT_EQ(exit_code_of(write(folder.path(), kNew)), ExitCode::kCannotCreate);
  EXPECT_EQ(exit_code_of(write(folder.file(std::string(300, 'n')), kNew)), ExitCode::kCannotCreate);
  EXPECT_THAT(folder.names(), IsEmpty());
}

// Fault F22 (docs/faults.md): the file system is really full.
TEST(AtomicFile, FullFileSystemKeepsTheOldFile) {
  ScratchFolder folder;
  const ChildEnd end = in_child([&] {
    if (!enter_own_mounts() || !mount_tmpfs(folder.path(), "64k")) return 99;
    const std::string path = folder.file("manifest.json");
    if (!write(path, kOld).ok()) return 1;
    const absl::Status status = write(path, kNew);
    std::fputs((message_of(status) + "\n").c_str(), stderr);
    if (content_of(path) != kOld) return 2;
    if (folder.names().size() != 1) return 3;
    return static_cast<int>(exit_code_of(status));
  });
  if (end.exit_code == 99) GTEST_SKIP() << "no right to mount here";
  EXPECT_EQ(end.exit_code, static_cast<int>(ExitCode::kIo));
  EXPECT_THAT(end.text, AllOf(HasSubstr("wanted 100000 bytes, got "), HasSubstr("bytes free"), HasSubstr("errno 28")));
}

TEST(AtomicFile, TwoWritersAtOnceBothSucceed) {
  ScratchFolder folder;
  const std::string path = folder.file("x");
  const auto repeat = [&](const std::string& text) {
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(write(path, text).ok());
  };
  std::thread other([&] { repeat(kOld); });
  repeat(kNew);
  other.join();
  const std::string content = content_of(path);
  EXPECT_TRUE(content == kOld || content == kNew);
  EXPECT_THAT(folder.names(), ElementsAre("x"));
}

}  // namespace
}  // namespace tessera
