#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <span>
#include <string>

#include "checkpoint/manifest.h"
#include "checkpoint/shard_header.h"
#include "offload/files/aligned_memory.h"

namespace tessera {

/// Writes one file of a checkpoint: first the head, then the data. The data is given in the order of the pieces, in
/// portions of any size, and is hashed in chunks of SavedFile::kChunkBytes.
///
/// A ShardWriter collects data in one of two blocks (double buffering) while a thread writes the other block. It writes
/// full blocks past the page cache (O_DIRECT) if the file system supports O_DIRECT. It allocates no other memory. So
/// data is copied only once, the page cache is not filled with a file that is seldom read, and little is left for the
/// fsync. Without O_DIRECT it writes through the page cache, and asks the system to begin writing to the disk early.
///
/// Messages begin with `who`. Errors: 73 if the file cannot be created; 77 without permission; 71 without free
/// descriptors or memory; 74 if the disk is full (the message has the bytes wanted and free), or if a write or fsync
/// fails. After an error only the destructor may be called. A failed fsync is not tried again.
class ShardWriter {
 public:
  /// Creates `folder`/`name`. Fails if a file with this name exists.
  static absl::StatusOr<std::unique_ptr<ShardWriter>> create(const std::string& folder, const std::string& name,
                                                             const ShardHeader& header, const std::string& who);
  ~ShardWriter();
  ShardWriter(const ShardWriter&) = delete;
  ShardWriter& operator=(const ShardWriter&) = delete;

  /// Writes the next bytes of the data. Their memory may be reused when the function returns.
  absl::Status append(std::span<const std::byte> data);
  /// Returns the number of bytes of data that were given so far.
  std::int64_t written() const { return appended_; }

  /// Writes the rest, syncs and closes the file, and returns its entry in the manifest. It fails with error 70 if the
  /// data is not as long as the header says.
  absl::StatusOr<SavedFile> finish();

 private:
  ShardWriter(std::string path, std::string who) : path_(std::move(path)), who_(std::move(who)) {}
  /// Size of a block in bytes, a multiple of SavedFile::kChunkBytes.
  static constexpr std::int64_t kBlockBytes = std::int64_t{4} << 20;

  absl::Status take_blocks();
  void hash_chunk();
  absl::Status hand_over_block();
  absl::Status end_write();
  void set_direct(bool direct);
  absl::Status write(std::span<const std::byte> bytes, std::int64_t offset);
  void begin_writeback(std::int64_t end);
  absl::Status other_size() const;
  absl::Status error(const char* operation, int error, std::int64_t offset = -1, std::int64_t wanted = -1,
                     std::int64_t got = -1) const;

  const std::string path_, who_;
  int fd_ = -1;
  std::int64_t file_bytes_ = 0, appended_ = 0, wanted_ = 0;
  std::array<AlignedMemory, 2> blocks_;
  std::size_t block_ = 0;                ///< index of the block that is being filled
  std::size_t filled_ = 0, hashed_ = 0;  ///< number of bytes in this block, and number of these that are hashed
  SavedFile file_;
  // The write that is under way, if there is one; `end_write` waits for it.
  std::future<absl::Status> under_way_;
  bool is_direct_ = false;
  std::int64_t in_writeback_ = 0;  ///< number of bytes that the disk was asked to write
};

}  // namespace tessera
