#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/shard_header.h"

namespace tessera {

/// Writes one file of a checkpoint: the head first, then the data, given in the order of the pieces in any portions. Data is
/// gathered into chunks of SavedFile::kChunkBytes, which is all the memory that it takes; each chunk is hashed and written.
///
/// Errors, with `who` in front: 73 where the file cannot be created, 77, 71, and 74 for a full disk (bytes wanted and free), a
/// failed write or fsync. After one, nothing but the destructor may be called. A failed fsync is not tried again.
class ShardWriter {
 public:
  /// Creates `folder`/`name`. Fails if there is a file of that name.
  static absl::StatusOr<std::unique_ptr<ShardWriter>> create(const std::string& folder, const std::string& name,
                                                             const ShardHeader& header, const std::string& who);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  absl::Status append(std::span<const std::byte> data);
  /// Of the data, so far.
  std::int64_t written() const { return appended_; }

  /// Writes the rest, syncs and closes the file, and says what the manifest has to know. 70 if the data is not as long as the
  /// header says.
  absl::StatusOr<SavedFile> finish();

 private:
  ShardWriter(std::string path, std::string who) : path_(std::move(path)), who_(std::move(who)) {}
  absl::Status write(std::span<const std::byte> bytes);
  absl::Status write_chunk();
  void begin_writeback();
  absl::Status error(const char* operation, int error, std::int64_t wanted = -1, std::int64_t got = -1) const;

  const std::string path_, who_;
  int fd_ = -1;
  std::int64_t file_bytes_ = 0, appended_ = 0, wanted_ = 0;
  std::int64_t in_writeback_ = 0;  ///< bytes that the disk was asked to begin with
  std::vector<std::byte> chunk_;
  SavedFile file_;
};

}  // namespace tessera
