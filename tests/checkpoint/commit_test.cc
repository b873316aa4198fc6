// Tests commits and the log that has the last two of them: damage is noticed, and a failed operation loses nothing.

#include "checkpoint/commit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "checkpoint/commit_log.h"
#include "offload/files/fault_plan.h"
#include "runtime/base/status.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Commit some_commit(std::int64_t generation) {
  return {.generation = generation,
          .run = ~std::uint64_t{0} - 5,
          .step = 10 * generation,
          .layout = 77,
          .parts = {{"a", std::string("x\0y", 3)}, {"empty", ""}, {"b", std::string(1000, 'z')}}};
}

void expect_same(const Commit& got, const Commit& wanted) {
  EXPECT_EQ(got.generation, wanted.generation);
  EXPECT_EQ(got.run, wanted.run);
  EXPECT_EQ(got.step, wanted.step);
  EXPECT_EQ(got.layout, wanted.layout);
  EXPECT_EQ(got.parts, wanted.parts);
}

TEST(Commit, WrittenCommitReadsBackTheSame) {
  const auto read = read_commit("file", write_commit(some_commit(3)));
  ASSERT_TRUE(read.ok()) << read.status();
  expect_same(*read, some_commit(3));
}

TEST(Commit, EveryFlippedBitAndEveryCutIsNoticed) {
  const std::string bytes = write_commit(some_commit(3));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    std::string changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ (1 << (i % 8)));
    EXPECT_EQ(exit_code_of(read_commit("file", changed).status()), ExitCode::kCorruptData) << i;
    EXPECT_EQ(exit_code_of(read_commit("file", bytes.substr(0, i)).status()), ExitCode::kCorruptData) << i;
  }
}

TEST(CommitLog, LastTwoCommitsAreKept) {
  const ScratchFolder folder;
  EXPECT_FALSE(CommitLog::was_opened(folder.path() + "/new", 12));
  auto log = CommitLog::open(folder.path() + "/new", 12, "rank 12");
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_TRUE((*log)->read()->empty());
  EXPECT_TRUE(CommitLog::was_opened(folder.path() + "/new", 12));
  EXPECT_FALSE(CommitLog::was_opened(folder.path() + "/new", 11));
  for (std::int64_t generation = 1; generation <= 4; ++generation) {
    ASSERT_TRUE((*log)->write(some_commit(generation)).ok());
    const auto read = (*log)->read();
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_EQ(read->size(), generation == 1 ? 1u : 2u);
    expect_same(read->back(), some_commit(generation));
  }
  ASSERT_TRUE((*log)->remove(4).ok());
  ASSERT_TRUE((*log)->remove(4).ok());
  expect_same((*log)->read()->back(), some_commit(3));
}

// A rank that never committed leaves only its lock file, and is not counted.
TEST(CommitLog, RanksWithCommitsAreCounted) {
  const ScratchFolder folder;
  EXPECT_EQ(CommitLog::ranks_in(folder.path() + "/new"), 0);
  for (const int rank : {0, 1, 2}) {
    auto log = CommitLog::open(folder.path(), rank, "a rank");
    ASSERT_TRUE(log.ok()) << log.status();
    if (rank < 2) {
      ASSERT_TRUE((*log)->write(some_commit(1 + rank)).ok());
    }
  }
  EXPECT_EQ(CommitLog::ranks_in(folder.path()), 2);
}

TEST(CommitLog, OpenLogIsLocked) {
  const ScratchFolder folder;
  auto log = CommitLog::open(folder.path(), 0, "rank 0");
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_TRUE(CommitLog::open(folder.path(), 1, "rank 1").ok());
  const auto second = CommitLog::open(folder.path(), 0, "rank 0");
  EXPECT_EQ(exit_code_of(second.status()), ExitCode::kUnavailable);
  EXPECT_THAT(message_of(second.status()), AllOf(HasSubstr(folder.path()), HasSubstr("hint:")));
}

TEST(CommitLog, DamagedCommitIsSkippedAndLeftoversAreRemoved) {
  const ScratchFolder folder;
  const std::string stem = folder.path() + "/rank-00000";
  {
    auto log = CommitLog::open(folder.path(), 0, "rank 0");
    ASSERT_TRUE((*log)->write(some_commit(1)).ok());
    ASSERT_TRUE((*log)->write(some_commit(2)).ok());
  }
  std::ofstream(stem + ".commit-0", std::ios::binary | std::ios::app) << "x";
  std::ofstream(stem + ".commit-1.tmp-4711-0") << "half";
  auto log = CommitLog::open(folder.path(), 0, "rank 0");
  ASSERT_TRUE(log.ok()) << log.status();
  ASSERT_TRUE((*log)->remove_leftovers().ok());
  EXPECT_FALSE(std::filesystem::exists(stem + ".commit-1.tmp-4711-0"));
  const auto read = (*log)->read();
  ASSERT_EQ(read->size(), 1u);
  expect_same(read->front(), some_commit(1));
}

TEST(CommitLog, FilesKeptBesideCommitsComeBackOrAreDamage) {
  const ScratchFolder folder;
  auto log = CommitLog::open(folder.path(), 3, "rank 3");
  const std::string bytes(5000, '\7');
  const auto first = (*log)->keep("of the run before"), hash = (*log)->keep(bytes);
  ASSERT_TRUE(hash.ok()) << hash.status();
  EXPECT_EQ(*(*log)->kept(*hash), bytes);
  ASSERT_TRUE((*log)->remove_kept_but(*hash).ok());
  EXPECT_EQ(*(*log)->kept(*hash), bytes);
  const auto refusal = [&](const std::string& of) {
    const auto kept = (*log)->kept(of);
    EXPECT_EQ(exit_code_of(kept.status()), ExitCode::kCorruptData);
    return message_of(kept.status());
  };
  EXPECT_THAT(refusal(*first), AllOf(HasSubstr("rank 3"), HasSubstr(*first), HasSubstr("missing"), HasSubstr("hint:")));
  std::ofstream(folder.path() + "/rank-00003.kept-" + *hash, std::ios::binary | std::ios::app) << "x";
  EXPECT_THAT(refusal(*hash), AllOf(HasSubstr(*hash), HasSubstr("damaged"), HasSubstr("hint:")));
}

// A folder without a whole commit is damaged if it has a damaged commit, or the file .begun. Otherwise it is the folder
// of a run before its first commit.
TEST(CommitLog, FolderWithLostCommitsIsDamaged) {
  const auto refusal = [](bool begun, bool two, const std::function<void(const std::string& file)>& damage) {
    const ScratchFolder folder;
    const std::string stem = folder.path() + "/rank-00000";
    auto log = CommitLog::open(folder.path(), 0, "rank 0");
    EXPECT_TRUE((*log)->write(some_commit(1)).ok());
    EXPECT_TRUE(!begun || (*log)->begin().ok());
    EXPECT_TRUE(!two || (*log)->write(some_commit(2)).ok());
    damage(stem + ".commit-1");
    if (two) damage(stem + ".commit-0");
    const auto read = (*log)->read();
    if (read.ok()) return std::to_string(read->size()) + " commits";
    EXPECT_EQ(exit_code_of(read.status()), ExitCode::kCorruptData);
    EXPECT_THAT(message_of(read.status()), AllOf(HasSubstr("rank 0"), HasSubstr(folder.path()), HasSubstr("hint:")));
    return message_of(read.status());
  };
  const auto emptied = [](const std::string& file) { std::filesystem::resize_file(file, 0); };
  const auto changed = [](const std::string& file) { std::ofstream(file, std::ios::app) << "x"; };
  const auto removed = [](const std::string& file) { std::filesystem::remove(file); };
  for (const bool two : {false, true}) {
    EXPECT_THAT(refusal(two, two, emptied), HasSubstr("rank-00000.commit-1"));
    EXPECT_THAT(refusal(two, two, changed), HasSubstr("rank-00000.commit-1"));
  }
  EXPECT_THAT(refusal(true, true, removed), AllOf(HasSubstr("rank-00000.commit-1"), HasSubstr("are missing")));
  EXPECT_EQ(refusal(false, false, removed), "0 commits");
}

TEST(Commit, NestedPartsReadBackAndCutsAreRefused) {
  const CommitParts parts = {{"a", std::string("b\0c", 3)}, {"", ""}};
  CommitParts read;
  const std::string text = write_parts(parts);
  ASSERT_TRUE(read_parts(text, read));
  EXPECT_EQ(read, parts);
  for (std::size_t length = 0; length < text.size(); ++length)
    EXPECT_FALSE(read_parts(std::string_view(text).substr(0, length), read)) << length;
  EXPECT_FALSE(read_parts(text + "x", read));
}

// A process that was forked from a rank, such as a DataLoader's worker, neither releases the rank's lock nor holds it.
TEST(CommitLog, ForkedProcessNeitherKeepsNorReleasesTheLock) {
  const ScratchFolder folder;
  auto log = CommitLog::open(folder.path(), 0, "rank 0");
  ASSERT_TRUE(log.ok());
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    (*log)->forget_lock();
    static_cast<void>(::write(ready[1], "x", 1));
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(exit_code_of(CommitLog::open(folder.path(), 0, "rank 0").status()), ExitCode::kUnavailable);
  log->reset();
  EXPECT_TRUE(CommitLog::open(folder.path(), 0, "rank 0").ok());
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  for (const int end : ready) ::close(end);
}

// The n-th file operation of one kind in a commit fails. The previous commit still exists then, and this commit is
// either whole or does not exist.
TEST(CommitLog, EveryFailedOperationKeepsTheCommitBefore) {
  for (const FaultSite site : {FaultSite::kOpen, FaultSite::kWrite, FaultSite::kFsync, FaultSite::kRename}) {
    for (std::int64_t n = 1;; ++n) {
      const ScratchFolder folder;
      auto log = CommitLog::open(folder.path(), 0, "rank 0");
      ASSERT_TRUE((*log)->write(some_commit(1)).ok());
      absl::Status status;
      std::int64_t faults = 0;
      {
        ScopedFaults failing({{.site = site, .nth = n, .action = FaultAction::kErrno, .number = EIO}});
        status = (*log)->write(some_commit(2));
        faults = failing.plan().faults();
      }
      if (faults == 0) {
        EXPECT_TRUE(status.ok());
        EXPECT_GT(n, 1);
        break;
      }
      EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 0"), HasSubstr("errno 5")));
      ASSERT_TRUE((*log)->remove(2).ok());
      expect_same((*log)->read()->back(), some_commit(1));
    }
  }
}

}  // namespace
}  // namespace tessera
