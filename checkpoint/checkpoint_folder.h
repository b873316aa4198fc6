#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/files/folder_lock.h"
#include "checkpoint/files/spare_descriptors.h"
#include "offload/files/file_place.h"

namespace tessera {

/// A folder of checkpoints has these files and folders:
///
///   latest                         one line: the name of the checkpoint that was committed last
///   best                           one line: the name of the best checkpoint by the program's measure, if there is one
///   step-000000000100/             a committed checkpoint, which nobody writes any more
///     manifest.json
///     rank-00000.safetensors ...
///   step-000000000200.tmp-.../     a save under way, or files that a killed save left; nobody reads it
///   lock                           held by a save under way
///   run.lock                       held by a run of `tessera train` that saves there
///
/// A checkpoint is committed by the rename of its folder, after all its files have reached the disk. Then `latest` is
/// replaced, also by a rename. So at any moment, even after errors, kill -9 and power loss, `latest` names a whole
/// checkpoint, if any was committed.
struct ListedCheckpoint {
  std::string name;
  std::int64_t step = 0;
};

/// Returns the committed checkpoints of a folder; the checkpoint that was committed last is at the end. Errors: 66 if
/// there is no such folder; 77 without permission; 74 if it cannot be read.
absl::StatusOr<std::vector<ListedCheckpoint>> list_checkpoints(const std::string& folder, const std::string& who);

/// Returns the names of a folder's checkpoints that have no manifest. A save gives a folder such a name only after all
/// files were written, so these checkpoints are damaged. Errors: those of list_checkpoints.
absl::StatusOr<std::vector<std::string>> damaged_checkpoints(const std::string& folder, const std::string& who);

/// Returns the name in `latest`. Errors: 66 if there is no such file, or no such checkpoint (the text lists the
/// checkpoints); 65 if the file does not have the name of a checkpoint.
absl::StatusOr<std::string> latest_checkpoint(const std::string& folder, const std::string& who);

/// Returns the name in `best`. Errors: those of latest_checkpoint, for `best` instead of `latest`.
absl::StatusOr<std::string> best_checkpoint(const std::string& folder, const std::string& who);

/// Returns the checkpoint that a user means by `path`: `path` itself if it has a manifest, the best checkpoint for
/// `folder`/best, else the latest checkpoint in the folder `path`. Errors: 66 if there is no such checkpoint; 65 if
/// `latest` or `best` does not have the name of a checkpoint.
absl::StatusOr<std::string> find_checkpoint(const std::string& path, const std::string& who);

/// Makes `folder` if it does not exist, and locks it against other runs. It is meant for a program that saves there
/// until it ends. Errors: 69 if another run has locked it; 73 if it cannot be created; 77 without permission; 71
/// without free descriptors or memory.
absl::StatusOr<FolderLock> lock_for_run(const std::string& folder, const std::string& who);

/// A checkpoint that is being made, by one rank for all ranks. The object holds the folder's lock while it lives. The
/// destructor removes the written files, unless the checkpoint was committed.
class UnfinishedCheckpoint {
 public:
  /// Makes `folder` if it does not exist, and takes its lock. It removes files that killed saves have left, and makes a
  /// new folder for the files of step `step`. It takes the descriptors that `commit` needs. Errors: 69 if another
  /// process saves there now; 73 if the folder cannot be created; 77 without permission; 71 if too many files are open.
  static absl::StatusOr<std::unique_ptr<UnfinishedCheckpoint>> begin(const std::string& folder, std::int64_t step,
                                                                     const std::string& who);
  ~UnfinishedCheckpoint();
  UnfinishedCheckpoint(const UnfinishedCheckpoint&) = delete;
  UnfinishedCheckpoint& operator=(const UnfinishedCheckpoint&) = delete;

  /// Returns the folder in which the files of the checkpoint are written before `commit`.
  const std::string& path() const { return path_; }
  /// Returns the folder in which the files will be after `commit`.
  std::string committed_path() const { return folder_ + "/" + name_; }

  /// Writes the manifest, syncs and renames. Then it makes `latest`, and if `is_best` also `best`, name the new
  /// checkpoint, whose path it returns. REQUIRES: all files are written and synced. If a later sync, or the write of
  /// `latest` or `best`, fails after the rename, the message says that the checkpoint is whole, but that `latest` or
  /// `best` may not name it.
  absl::StatusOr<std::string> commit(const std::string& manifest, bool is_best = false);

  /// Renames the oldest checkpoints until `keep` are left (1 if `keep` is less). Call it after `commit`. The function
  /// keeps the checkpoints that `latest` and `best` name, and does not count the best checkpoint. Adds the paths of
  /// renamed checkpoints to `pruned`, for remove_pruned, even if it fails. The next `begin` removes files that are left
  /// of these checkpoints.
  absl::Status prune(std::int64_t keep, std::vector<std::string>& pruned) const;

 private:
  UnfinishedCheckpoint(std::string folder, std::string who) : folder_(std::move(folder)), who_(std::move(who)) {}
  absl::Status remove_leftovers() const;

  const std::string folder_, who_;
  std::string name_;  ///< name that the checkpoint has once it is committed
  std::string path_;
  FolderLock lock_;
  SpareDescriptors spare_;  ///< for `commit`, and for the destructor, which removes what was not committed
  bool exists_ = false;
};

/// Removes the checkpoints that `prune` has renamed. It needs no lock; another process may remove the same files
/// meanwhile. The removal may take a while if the file system tells the disk about each free block. The function tries
/// to remove all paths, and reports the first failure.
absl::Status remove_pruned(const std::vector<std::string>& paths, const std::string& who);

/// Removes a folder of checkpoints with all that is in it; it does nothing if there is no such folder. `latest` is
/// removed first, so if the program is killed meanwhile, nobody finds a checkpoint there. REQUIRES: nobody saves there
/// or reads there. Errors: 77 without permission; 74 if the removal fails for another reason.
absl::Status remove_checkpoints(const FilePlace& folder, const std::string& who);

}  // namespace tessera
