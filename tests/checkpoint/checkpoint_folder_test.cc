// Tests the folder of checkpoints: which checkpoint is the latest, which checkpoints stay, and the texts of errors. A
// failed operation or a crash at any operation leaves the old checkpoint or the new one.

#include "checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>

#include "checkpoint/saved_checkpoint.h"
#include "checkpoint/shard_writer.h"
#include "offload/files/fault_plan.h"
#include "runtime/base/status.h"
#include "tests/checkpoint/made_up.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

/// Saves a whole checkpoint with one rank. The checkpoint's content depends on `step`. Returns the checkpoint's path.
absl::StatusOr<std::string> save(const std::string& folder, std::int64_t step, std::int64_t keep = 100,
                                 bool is_best = false) {
  TESSERA_ASSIGN_OR_RETURN(const auto unfinished, UnfinishedCheckpoint::begin(folder, step, "rank 0"));
  Manifest manifest;
  manifest.step = step;
  manifest.parameters = {{"w", {}, {600}, {}, "F32", false}};
  ShardHeader header{{{kValue, "w", "F32", 0, 600}}};
  TESSERA_ASSIGN_OR_RETURN(const auto writer,
                           ShardWriter::create(unfinished->path(), "rank-00000.safetensors", header, "rank 0"));
  TESSERA_RETURN_IF_ERROR(writer->append(made_up_bytes(header.pieces[0], static_cast<std::uint64_t>(step))));
  TESSERA_ASSIGN_OR_RETURN(const SavedFile file, writer->finish());
  manifest.files = {file};
  TESSERA_ASSIGN_OR_RETURN(std::string path, unfinished->commit(write_manifest(manifest), is_best));
  std::vector<std::string> pruned;
  TESSERA_RETURN_IF_ERROR(unfinished->prune(keep, pruned));
  TESSERA_RETURN_IF_ERROR(remove_pruned(pruned, "rank 0"));
  return path;
}

/// Reads all of the checkpoint at `path`. Returns its step, or -1 if the checkpoint is not whole.
std::int64_t step_at(const std::string& path) {
  auto checkpoint = SavedCheckpoint::open(path, "rank 0");
  if (!checkpoint.ok()) return -1;
  std::vector<std::byte> bytes(2400);
  if (!(*checkpoint)->read(kValue, "w", 0, bytes).ok()) return -1;
  const std::int64_t step = (*checkpoint)->manifest().step;
  return bytes == made_up_bytes({kValue, "w", "F32", 0, 600}, static_cast<std::uint64_t>(step)) ? step : -1;
}

std::int64_t latest_step(const std::string& folder) {
  const auto path = find_checkpoint(folder, "rank 0");
  return path.ok() ? step_at(*path) : -1;
}

std::int64_t best_step(const std::string& folder) { return latest_step(folder + "/best"); }

std::vector<std::string> listed(const std::string& folder) {
  std::vector<std::string> names;
  const auto there = list_checkpoints(folder, "test");
  EXPECT_TRUE(there.ok()) << there.status();
  if (!there.ok()) return {};
  for (const ListedCheckpoint& checkpoint : *there) names.push_back(checkpoint.name);
  return names;
}

TEST(CheckpointFolder, LatestIsTheLastCommitted) {
  const ScratchFolder scratch;
  const std::string folder = scratch.file("runs/a");  // the first save makes this folder
  for (const std::int64_t step : {10, 20, 5}) {
    const auto path = save(folder, step);
    ASSERT_TRUE(path.ok()) << path.status();
    EXPECT_EQ(latest_step(folder), step);
    EXPECT_EQ(step_at(*path), step);
    ::usleep(20000);  // folders are listed in the order of their commits
  }
  EXPECT_THAT(listed(folder), ElementsAre("step-000000000010", "step-000000000020", "step-000000000005"));
  EXPECT_EQ(*find_checkpoint(folder + "/step-000000000010", "test"), folder + "/step-000000000010");
  struct stat info {};
  ASSERT_EQ(::stat((folder + "/step-000000000010").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
}

TEST(CheckpointFolder, StepSavedAgainGetsANewName) {
  const ScratchFolder folder;
  for (const char* name : {"step-000000000010", "step-000000000010.1", "step-000000000010.2"}) {
    EXPECT_EQ(*save(folder.path(), 10), folder.file(name));
    EXPECT_EQ(content_of(folder.file("latest")), std::string(name) + "\n");
    ::usleep(20000);
  }
  EXPECT_EQ(listed(folder.path()).size(), 3u);
}

TEST(CheckpointFolder, BestCheckpointIsKept) {
  const ScratchFolder folder;
  EXPECT_EQ(exit_code_of(best_checkpoint(folder.path(), "test").status()), ExitCode::kNoInput);
  for (const std::int64_t step : {1, 2, 3, 4, 5}) {
    ASSERT_TRUE(save(folder.path(), step, /*keep=*/2, /*is_best=*/step == 2).ok());
    ::usleep(20000);
  }
  EXPECT_THAT(listed(folder.path()), ElementsAre("step-000000000002", "step-000000000004", "step-000000000005"));
  EXPECT_EQ(*find_checkpoint(folder.file("best"), "test"), folder.file("step-000000000002"));
  EXPECT_EQ(latest_step(folder.path()), 5);
  // Another checkpoint is the best one now. The former best one is old, and is therefore removed.
  ASSERT_TRUE(save(folder.path(), 6, 2, true).ok());
  EXPECT_THAT(listed(folder.path()), ElementsAre("step-000000000005", "step-000000000006"));
  EXPECT_EQ(*find_checkpoint(folder.file("best"), "test"), folder.file("step-000000000006"));
  // A damaged pointer is an error. Then no checkpoint is removed, since each could be the one that the pointer named.
  std::ofstream(folder.file("best")) << "../../etc\n";
  EXPECT_EQ(exit_code_of(find_checkpoint(folder.file("best"), "test").status()), ExitCode::kCorruptData);
  EXPECT_FALSE(save(folder.path(), 7, 1).ok());
  EXPECT_EQ(listed(folder.path()).size(), 3u);
}

TEST(CheckpointFolder, KeepsTheNewestAndNeverLessThanTheLatest) {
  const ScratchFolder folder;
  for (const std::int64_t step : {1, 2, 3, 4}) {
    ASSERT_TRUE(save(folder.path(), step).ok());
    ::usleep(20000);
  }
  ASSERT_TRUE(save(folder.path(), 5, 2).ok());
  EXPECT_THAT(listed(folder.path()), ElementsAre("step-000000000004", "step-000000000005"));
  ASSERT_TRUE(save(folder.path(), 6, 0).ok());
  EXPECT_THAT(listed(folder.path()), ElementsAre("step-000000000006"));
  EXPECT_THAT(folder.names(), UnorderedElementsAre("latest", "lock", "step-000000000006"));
  // The clock was set back, so the latest checkpoint seems to be the oldest. That checkpoint stays.
  timespec old[2] = {{1, 0}, {1, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, folder.file("step-000000000006/manifest.json").c_str(), old, 0), 0);
  auto unfinished = UnfinishedCheckpoint::begin(folder.path(), 7, "rank 0");
  std::filesystem::create_directory(folder.file("step-000000000008"));
  write_content(folder.file("step-000000000008/manifest.json"), "");
  std::vector<std::string> pruned;
  ASSERT_TRUE((*unfinished)->prune(1, pruned).ok());
  EXPECT_EQ(latest_step(folder.path()), 6);
}

TEST(CheckpointFolder, NextSaveRemovesOnlyWhatAKilledOneLeft) {
  const ScratchFolder folder;
  ASSERT_TRUE(save(folder.path(), 1).ok());
  for (const char* name : {"step-000000000002.tmp-77-0", "step-000000000001.tmp-pruned"}) {
    std::filesystem::create_directory(folder.file(name));
    write_content(folder.file(name) + "/rank-00000.safetensors", "x");
  }
  write_content(folder.file("latest.tmp-77-3"), "step-0");
  // Files of other programs stay in the folder.
  for (const char* name : {"notes.tmp-1", "step-100", "steps.tmp-5"})
    std::filesystem::create_directory(folder.file(name));
  EXPECT_EQ(latest_step(folder.path()), 1);  // a load ignores these folders
  EXPECT_THAT(listed(folder.path()), ElementsAre("step-000000000001"));
  ASSERT_TRUE(save(folder.path(), 3).ok());
  EXPECT_THAT(folder.names(), UnorderedElementsAre("latest", "lock", "notes.tmp-1", "step-000000000001",
                                                   "step-000000000003", "step-100", "steps.tmp-5"));
}

TEST(CheckpointFolder, TwoSavesAtOnceAreRefused) {
  const ScratchFolder folder;
  const auto first = UnfinishedCheckpoint::begin(folder.path(), 1, "rank 0");
  ASSERT_TRUE(first.ok());
  const auto second = UnfinishedCheckpoint::begin(folder.path(), 1, "rank 0");
  EXPECT_EQ(exit_code_of(second.status()), ExitCode::kUnavailable);
  EXPECT_THAT(message_of(second.status()),
              AllOf(HasSubstr("another process saves"), HasSubstr("process " + std::to_string(::getpid()) + " on ")));
}

TEST(CheckpointFolder, TwoRunsAtOnceAreRefused) {
  const ScratchFolder folder;
  const std::string runs = folder.file("new/runs");
  {
    const auto first = lock_for_run(runs, "first");
    ASSERT_TRUE(first.ok()) << first.status();
    EXPECT_TRUE(save(runs, 1).ok()) << "the run itself saves there";
    const auto second = lock_for_run(runs, "second");
    EXPECT_EQ(exit_code_of(second.status()), ExitCode::kUnavailable);
    EXPECT_THAT(message_of(second.status()), AllOf(HasSubstr("second: another process trains with checkpoints in "),
                                                   HasSubstr("process " + std::to_string(::getpid()) + " on ")));
    // Text that another program wrote into the lock file is not printed.
    write_content(runs + "/run.lock", "\x1b[31m");
    EXPECT_THAT(message_of(FolderLock::take(runs + "/run.lock", "is there", "third").status()),
                HasSubstr("now: another process holds"));
  }
  EXPECT_TRUE(lock_for_run(runs, "fourth").ok()) << "the first one has left";
}

TEST(CheckpointFolder, UncommittedSaveLeavesNothing) {
  const ScratchFolder folder;
  {
    const auto unfinished = UnfinishedCheckpoint::begin(folder.path(), 1, "rank 0");
    write_content((*unfinished)->path() + "/rank-00000.safetensors", "x");
  }
  EXPECT_THAT(folder.names(), ElementsAre("lock"));
}

// Other parts of the program open files while a checkpoint is written. Here nothing is left for the commit but what the
// save has taken at its beginning.
TEST(CheckpointFolder, SaveThatHasBegunCommitsThoughNoDescriptorIsFree) {
  const ScratchFolder folder;
  const auto unfinished = UnfinishedCheckpoint::begin(folder.path(), 1, "rank 0");
  ASSERT_TRUE(unfinished.ok()) << unfinished.status();
  Manifest manifest;
  manifest.step = 1;
  absl::StatusOr<std::string> path;
  {
    const FewDescriptors none(0);
    EXPECT_EQ(::eventfd(0, 0), -1);
    path = (*unfinished)->commit(write_manifest(manifest), /*is_best=*/true);
  }
  ASSERT_TRUE(path.ok()) << path.status();
  EXPECT_EQ(*latest_checkpoint(folder.path(), "rank 0"), "step-000000000001");
  EXPECT_EQ(*best_checkpoint(folder.path(), "rank 0"), "step-000000000001");
}

TEST(CheckpointFolder, SaveWithoutDescriptorsEndsBeforeItWritesOrCommits) {
  int failed = 0;
  for (int more = 0; more < 8; ++more) {
    const ScratchFolder folder;
    ASSERT_TRUE(save(folder.path(), 1).ok());
    absl::Status status;
    {
      const FewDescriptors few(more);
      status = save(folder.path(), 2).status();
    }
    EXPECT_EQ(latest_step(folder.path()), status.ok() ? 2 : 1) << more;
    EXPECT_THAT(folder.names(), ::testing::Each(::testing::Not(HasSubstr(".tmp-")))) << more;
    if (status.ok()) continue;
    ++failed;
    EXPECT_EQ(exit_code_of(status), ExitCode::kOsResource) << status;
    EXPECT_THAT(message_of(status), AllOf(HasSubstr("create of"), HasSubstr("hint: raise the limit of open files")));
  }
  EXPECT_EQ(failed, 5) << "a save needs its lock, two for its commit, and two to make a file";
}

TEST(CheckpointFolder, BadFoldersAreNamed) {
  const ScratchFolder folder;
  write_content(folder.file("file"), "x");
  EXPECT_EQ(exit_code_of(save("", 1).status()), ExitCode::kConfig);
  EXPECT_EQ(exit_code_of(save(folder.file("file"), 1).status()), ExitCode::kCannotCreate);
  EXPECT_EQ(exit_code_of(find_checkpoint(folder.file("none"), "x").status()), ExitCode::kNoInput);
  EXPECT_EQ(exit_code_of(find_checkpoint(folder.path(), "x").status()), ExitCode::kNoInput);
  ASSERT_TRUE(save(folder.path(), 1).ok());
  for (const auto& [text, code] : {std::pair("", ExitCode::kCorruptData),
                                   {"../elsewhere\n", ExitCode::kCorruptData},
                                   {"/etc\n", ExitCode::kCorruptData},
                                   {"step-000000000001/..\n", ExitCode::kCorruptData},
                                   {"step-000000000009\n", ExitCode::kNoInput}}) {
    write_content(folder.file("latest"), text);
    const auto found = find_checkpoint(folder.path(), "rank 0");
    EXPECT_EQ(exit_code_of(found.status()), code) << text;
    EXPECT_THAT(message_of(found.status()), HasSubstr("there are: step-000000000001")) << text;
  }
  write_content(folder.file("latest"), std::string(5000, 'x'));
  EXPECT_EQ(exit_code_of(find_checkpoint(folder.path(), "x").status()), ExitCode::kCorruptData);
}

TEST(CheckpointFolder, CheckpointWithoutManifestIsDamaged) {
  const ScratchFolder folder;
  for (const std::int64_t step : {1, 2}) ASSERT_TRUE(save(folder.path(), step).ok());
  EXPECT_THAT(*damaged_checkpoints(folder.path(), "x"), IsEmpty());
  std::filesystem::remove(folder.file("step-000000000002/manifest.json"));
  std::filesystem::create_directory(folder.file("step-000000000003.tmp-1-0"));  // a killed save left this
  EXPECT_THAT(*damaged_checkpoints(folder.path(), "x"), ElementsAre("step-000000000002"));
  EXPECT_THAT(listed(folder.path()), ElementsAre("step-000000000001"));
  EXPECT_EQ(exit_code_of(damaged_checkpoints(folder.file("none"), "x").status()), ExitCode::kNoInput);
}

// A link or a folder lies at a path that a save needs. The error names this obstacle, and has a remedy.
TEST(CheckpointFolder, ObstacleOfASaveIsNamed) {
  const ScratchFolder folder, other;
  std::filesystem::create_symlink(other.file("lock"), folder.file("lock"));
  absl::Status status = save(folder.path(), 1).status();
  EXPECT_EQ(exit_code_of(status), ExitCode::kCannotCreate);
  EXPECT_THAT(message_of(status),
              AllOf(HasSubstr(folder.file("lock")), HasSubstr("one stands where none is followed")));
  EXPECT_FALSE(std::filesystem::exists(other.file("lock")));
  std::filesystem::remove(folder.file("lock"));
  const std::string strange = folder.file("step-000000000001.tmp-1-0/notes");
  std::filesystem::create_directories(strange);
  status = save(folder.path(), 1).status();
  EXPECT_EQ(exit_code_of(status), ExitCode::kCannotCreate);
  EXPECT_THAT(message_of(status), AllOf(HasSubstr(strange + " is a folder"), HasSubstr("move it away")));
  std::filesystem::remove(strange);
  EXPECT_TRUE(save(folder.path(), 1).ok());
}

constexpr FaultSite kSites[] = {FaultSite::kOpen,   FaultSite::kRead,   FaultSite::kWrite, FaultSite::kFsync,
                                FaultSite::kRename, FaultSite::kUnlink, FaultSite::kMkdir};

// Faults F22 and F23 (docs/faults.md): an operation of a save fails. The error names the operation, a whole checkpoint
// is the latest one, and the next save works.
TEST(CheckpointFolder, EveryFailedOperationLeavesTheOldCheckpointOrTheNewOne) {
  for (const FaultSite site : kSites) {
    for (const int error : {EIO, ENOSPC}) {
      std::int64_t n = 1;
      for (;; ++n) {
        const ScratchFolder folder;
        ASSERT_TRUE(save(folder.path(), 1).ok());
        ASSERT_TRUE(save(folder.path(), 2, 100, /*is_best=*/true).ok());
        std::int64_t hits = 0;
        absl::Status status;
        {
          ScopedFaults faults({{.site = site, .nth = n, .action = FaultAction::kErrno, .number = error}});
          status = save(folder.path(), 3, 2, true).status();
          hits = faults.plan().faults();
        }
        const std::int64_t latest = latest_step(folder.path());
        EXPECT_TRUE(latest == 2 || latest == 3) << latest;
        EXPECT_THAT(best_step(folder.path()), AnyOf(2, 3));
        if (hits == 0) {
          EXPECT_TRUE(status.ok());
          break;
        }
        EXPECT_FALSE(status.ok()) << static_cast<int>(site) << " " << n;
        EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 0: "), HasSubstr(folder.path())));
        ASSERT_TRUE(save(folder.path(), 4, 1, true).ok());
        EXPECT_EQ(latest_step(folder.path()), 4);
        EXPECT_THAT(folder.names(), UnorderedElementsAre("best", "latest", "lock", "step-000000000004"));
      }
      EXPECT_GT(n, 1) << static_cast<int>(site);
    }
  }
}

/// Moves the folder of an unfinished or pruned checkpoint to `away`, and puts a link to `outside` in its place.
void put_link_in_place(const ScratchFolder& folder, const ScratchFolder& outside, const ScratchFolder& away) {
  for (const std::string& name : folder.names()) {
    if (name.find(".tmp-") == std::string::npos || !std::filesystem::is_directory(folder.file(name))) continue;
    std::filesystem::rename(folder.file(name), away.file(name));
    std::filesystem::create_directory_symlink(std::filesystem::absolute(outside.path()), folder.file(name));
  }
}

// A stranger swaps the folder of a save for a link, before any operation of the save. Nothing behind the link changes.
TEST(CheckpointFolder, LinkThatTakesTheFoldersPlaceIsNotFollowed) {
  const std::string of_others = "of somebody else";
  int refused = 0;
  for (const FaultSite site : kSites) {
    for (std::int64_t n = 1, hits = 1; hits != 0; ++n) {
      const ScratchFolder folder, outside, away;
      ASSERT_TRUE(save(folder.path(), 1).ok());
      for (const char* name : {"manifest.json", "notes"}) std::ofstream(outside.file(name)) << of_others;
      absl::Status status;
      {
        ScopedFaults faults({{.site = site, .nth = n, .action = FaultAction::kCall, .call = [&] {
                                put_link_in_place(folder, outside, away);
                              }}});
        status = save(folder.path(), 2, /*keep=*/1).status();
        hits = faults.plan().faults();
      }
      SCOPED_TRACE(std::to_string(static_cast<int>(site)) + " " + std::to_string(n) + " " + message_of(status));
      EXPECT_THAT(outside.names(), ElementsAre("manifest.json", "notes"));
      for (const char* name : {"manifest.json", "notes"}) EXPECT_EQ(content_of(outside.file(name)), of_others);
      if (status.ok()) {
        EXPECT_EQ(latest_step(folder.path()), 2);
        continue;
      }
      ++refused;
      EXPECT_THAT(latest_step(folder.path()), AnyOf(1, 2));
      EXPECT_THAT(message_of(status), HasSubstr("one stands where none is followed"));
    }
  }
  EXPECT_GE(refused, 5) << "swaps between the folder's making and its rename";
}

TEST(CheckpointFolder, ExceededQuotaIsNamed) {
  for (const FaultSite site : {FaultSite::kMkdir, FaultSite::kWrite}) {
    const ScratchFolder folder;
    ASSERT_TRUE(save(folder.path(), 1).ok());
    ScopedFaults faults({{.site = site, .nth = 1, .action = FaultAction::kErrno, .number = EDQUOT}});
    const absl::Status status = save(folder.path(), 2).status();
    EXPECT_EQ(exit_code_of(status), ExitCode::kIo);
    EXPECT_THAT(message_of(status), AllOf(HasSubstr("errno 122"), HasSubstr("bytes free"), HasSubstr("quota")));
    EXPECT_EQ(latest_step(folder.path()), 1);
  }
}

// Faults F2 and F26 (docs/faults.md): at any operation of a save, its process is killed, or the machine loses power.
TEST(CheckpointFolder, AnyCrashLeavesTheOldCheckpointOrTheNewOne) {
  for (const FaultRule& kind : {FaultRule{.action = FaultAction::kCrash, .number = 137},
                                FaultRule{.action = FaultAction::kDropUnsynced, .keep_renames = false},
                                FaultRule{.action = FaultAction::kDropUnsynced, .keep_renames = true}}) {
    for (const FaultSite site : kSites) {
      std::int64_t n = 1;
      for (;; ++n) {
        const ScratchFolder folder;
        ASSERT_TRUE(save(folder.path(), 1).ok());
        ASSERT_TRUE(save(folder.path(), 2, 100, /*is_best=*/true).ok());
        FaultRule rule = kind;
        rule.site = site;
        rule.nth = n;
        const ChildEnd end = in_child([&] {
          ScopedFaults faults({rule});
          if (!save(folder.path(), 3, 2, true).ok()) return 1;
          return faults.plan().faults() == 0 ? 0 : 2;
        });
        const std::int64_t latest = latest_step(folder.path());
        EXPECT_TRUE(latest == 2 || latest == 3)
            << "site " << static_cast<int>(site) << " operation " << n << ": " << latest;
        EXPECT_THAT(best_step(folder.path()), AnyOf(2, 3)) << "site " << static_cast<int>(site) << " operation " << n;
        for (const std::string& name : listed(folder.path())) EXPECT_GT(step_at(folder.file(name)), 0) << name;
        if (end.exit_code == 0) break;
        EXPECT_EQ(end.exit_code, 137);
        ASSERT_TRUE(save(folder.path(), 4, 1, true).ok());
        EXPECT_THAT(folder.names(), UnorderedElementsAre("best", "latest", "lock", "step-000000000004"));
      }
      EXPECT_GT(n, 1);
    }
  }
}

// This test shows that the test above can fail: a power loss destroys the checkpoint if shards are not synced.
TEST(CheckpointFolder, PowerLossDamagesASaveThatWasNotSynced) {
  const ScratchFolder folder;
  const ChildEnd end = in_child([&] {
    ScopedFaults faults(
        {{.site = FaultSite::kFsync, .path = "rank-00000", .nth = 1, .action = FaultAction::kTorn},
         {.site = FaultSite::kUnlink, .path = "nothing", .nth = 1, .action = FaultAction::kDropUnsynced},
         {.site = FaultSite::kOpen,
          .path = "power",
          .nth = 1,
          .action = FaultAction::kDropUnsynced,
          .keep_renames = true}});
    if (!save(folder.path(), 1).ok()) return 1;
    return fault_at(FaultSite::kOpen, "power").action == FaultAction::kNone ? 2 : 3;
  });
  EXPECT_EQ(end.exit_code, 137);
  EXPECT_EQ(latest_step(folder.path()), -1);
}

}  // namespace
}  // namespace tessera
