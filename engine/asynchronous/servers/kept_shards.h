#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/files/folder_lock.h"
#include "offload/files/file_place.h"
#include "runtime/base/mutex.h"

namespace tessera {

/// The options of a parameter server whose shards outlive it (`tessera serve --state`).
struct KeepOptions {
  static constexpr std::int64_t kMostLose = 1 << 20;

  std::string folder;     ///< folder in which each server has its own folder
  std::int64_t lose = 0;  ///< largest number of pushes to each shard that may be lost when the server ends
};

/// The files of the shards that a parameter server owns in one run: one file for each shard. Each file is whole at any
/// moment, even after kill -9 and power loss. ServedJob writes the shards that have changed, and reads the files when a
/// server comes back. Runs with equal definitions count as the same run. Files of another run are of no use, and are
/// overwritten. The last file has the data of server 0 about workers that come and go.
///
/// One thread at a time calls `write` for a file.
class KeptShards {
 public:
  /// Number of bytes of an image's head; the caller's bytes begin behind it.
  static constexpr std::size_t kHeadBytes = 64;

  /// Makes the folder of server number `server`, and locks it. `definition`: the run's definition, with the run's name.
  /// Errors: 69 where another server uses the folder; 73 where it cannot be created; 77 without permission; 71 without
  /// free descriptors or memory; 74 where a call fails for another reason.
  static absl::StatusOr<std::unique_ptr<KeptShards>> open(const KeepOptions& options, int server,
                                                          const std::string& definition);

  std::int64_t lose() const { return lose_; }
  const std::string& folder() const { return folder_.path(); }
  /// Writes an image, and fills in its first kHeadBytes. Errors: those of write_file_atomically.
  absl::Status write(std::size_t shard, std::vector<std::byte>& image) const;
  /// Reads the image that `write` has made. The result is empty if this run has no image. Errors: 65 for a file that is
  /// damaged; 77 without permission; 71 without free descriptors or memory; 74 where a read fails.
  absl::StatusOr<std::vector<std::byte>> read(std::size_t shard) const;

 private:
  KeptShards(FilePlace folder, FolderLock lock, std::int64_t lose, std::uint64_t run)
      : folder_(std::move(folder)), lock_(std::move(lock)), lose_(lose), run_(run) {}
  FilePlace place_of(std::size_t shard) const { return folder_ / ("shard-" + std::to_string(shard)); }

  const FilePlace folder_;  ///< this server's folder in the user's folder
  const FolderLock lock_;
  const std::int64_t lose_;
  const std::uint64_t run_;
};

/// The thread with which a ServedJob writes changed shards to the disk. `wake` and `failure` may be called by any
/// thread, also by one that holds a shard's mutex.
class KeepingThread {
 public:
  /// Writes the shards for which a write is due; with `is_last`, all shards with changes that are not on the disk yet.
  using Keep = std::function<absl::Status(bool is_last)>;

  /// Starts the thread. It calls `keep` after each `wake`, until one call fails.
  explicit KeepingThread(Keep keep);
  /// Calls `keep` for the last time, unless it has failed before.
  ~KeepingThread();
  KeepingThread(const KeepingThread&) = delete;
  KeepingThread& operator=(const KeepingThread&) = delete;

  /// Says that a write is due.
  void wake();
  /// Returns the error with which `keep` has failed. Nothing more is written after this error.
  absl::Status failure() const;

 private:
  void run();

  const Keep keep_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool is_due_ ABSL_GUARDED_BY(mutex_) = false, is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::jthread thread_;  // the thread is the last member, so that it starts last
};

}  // namespace tessera
