#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/files/folder_lock.h"

namespace tessera {

/// The commits of one rank in a folder of a local disk: the last commit, and the commit before it, in two files that
/// are written alternately. No other process can open the same rank's commits while this object lives.
///
/// Rank r has these files:
///
/// - rank-0000r.commit-0 and .commit-1;
/// - .lock, which stays when the run ends;
/// - .begun, which is empty, and is written before the second commit, since all ranks have a commit then. If a folder
///   has this file and no commits, the commits are lost. If it has neither, its run ended before the first commit.
/// - .kept-0123456789abcdef, with bytes that are not written again with each commit; commits name these bytes by their
///   hash.
class CommitLog {
 public:
  /// Opens a rank's commits, and makes the folder if it does not exist. `who` is the prefix of messages: "rank 0".
  /// Errors: 69 if another process has opened the same rank's commits; 73 if the folder cannot be created; 77 without
  /// permission; 71 without free descriptors or memory; 74 if a read or write fails.
  static absl::StatusOr<std::unique_ptr<CommitLog>> open(const std::string& folder, int rank, const std::string& who);

  /// Returns whether a run ever opened the rank's commits in the folder, even if that run ended before its first
  /// commit.
  static bool was_opened(const std::string& folder, int rank);
  /// Returns how many ranks, from rank 0 on, have files of commits in the folder. It does not read these files.
  static int ranks_in(const std::string& folder);
  /// Removes the files of all ranks' commits from the folder, those of rank 0 first. Locks stay. REQUIRES: no process
  /// has opened commits of the folder. Errors: 77 without permission; 74 if the removal fails for another reason.
  static absl::Status remove_all(const std::string& folder, const std::string& who);
  /// Returns the undamaged commits, the older commit first; none before the first commit. If one commit is damaged and
  /// the other is not, the damaged commit is left out, with a warning. The function changes no files. Errors: 65 if
  /// there were commits, and none of them is whole.
  absl::StatusOr<std::vector<Commit>> read() const;
  /// Removes the unfinished files that a process left because it was killed while it wrote a commit.
  absl::Status remove_leftovers() const;
  /// Returns whether all ranks have had a commit.
  bool has_begun() const;
  /// Notes that all ranks have a commit; only the first call does anything. REQUIRES: the second commit was not written
  /// before the first call.
  absl::Status begin() const;
  /// Writes a commit in place of the commit whose generation is lower by 2. At any moment the file has either the old
  /// or the new commit, even after errors, kills and power loss. After an error it may have either of the two (see
  /// `remove`).
  absl::Status write(const Commit& commit) const;
  /// Removes the commit with this generation number from the disk, if it is there. Errors: 77 without permission; 74 if
  /// the removal fails for another reason.
  absl::Status remove(std::int64_t generation) const;

  /// Writes bytes to a separate file. Commits then name the bytes by their hash. Returns this hash, in 16 digits.
  absl::StatusOr<std::string> keep(std::string_view bytes) const;
  /// Reads the bytes with this hash. Errors: 65 if the bytes are missing or damaged.
  absl::StatusOr<std::string> kept(const std::string& hash) const;
  /// Removes all bytes that were kept, except the bytes with the hash `hash`. If `hash` is empty, all are removed.
  absl::Status remove_kept_but(const std::string& hash) const;

  /// Forgets the lock in a forked process (FolderLock::forget).
  void forget_lock() { lock_.forget(); }

  /// Returns the beginning of this rank's file names, such as "/scratch/durable/rank-00000".
  const std::string& stem() const { return stem_; }

 private:
  CommitLog(std::string folder, std::string stem, std::string who, FolderLock lock)
      : folder_(std::move(folder)), stem_(std::move(stem)), who_(std::move(who)), lock_(std::move(lock)) {}
  std::string file_of(std::int64_t generation) const;
  std::string kept_file(const std::string& hash) const;
  absl::Status remove_files(const std::function<bool(std::string_view end)>& is_meant) const;
  absl::Status no_whole_commit(const std::vector<std::string>& damaged) const;

  const std::string folder_, stem_, who_;
  FolderLock lock_;
};

/// Returns the ranks, in ascending order, of which a run committed to the folder (their `.begun`). It does not read
/// their commits. Errors: 77 without permission; 74 if the folder cannot be listed for another reason.
absl::StatusOr<std::vector<int>> begun_ranks(const std::string& folder, const std::string& who);

}  // namespace tessera
