#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

/// The options of a BlockFile.
struct BlockFileOptions {
  std::string directory = {};
  std::int64_t bytes = 0;  ///< size of the file, a multiple of 4096, more than 0
  std::string who = {};    ///< beginning of error messages, such as "rank 0 optimizer state"
  /// True: reads and writes go past the page cache (O_DIRECT), if the file system supports that. False: reads and
  /// writes go through the page cache, which then has a second copy of the data.
  bool direct = true;
  /// Whether zeros are written over the whole file once. On ext4, overwriting blocks that were written before is about
  /// a quarter faster than writing to blocks that were only reserved. Writing zeros costs one write of the whole file,
  /// before training.
  bool write_zeros = true;
  /// A name for the file in the directory. A file with a name stays when the process ends. If a file of that name
  /// exists and has `bytes` bytes, it is opened with its content; a file of another size is replaced. If the name is
  /// empty, the file is a scratch file.
  std::string name = {};
  /// Used if there is a `name`: whether a file that is missing or has another size is an error. Such a file is then not
  /// changed.
  bool must_be_there = false;
};

/// A scratch file of this process. It has a fixed size, its bytes are zeros at first, and all its space on the disk is
/// reserved when it is created.
///
/// 1. No other process can open it: it has no name (O_TMPFILE, or it is unlinked as soon as it is made), and mode 0600.
/// 2. It is gone when the process has ended, however the process ends, and is never read by another run.
/// 3. Space on the disk is reserved when `create` returns. A later write can fail because of a full disk only if the
///    file system copies on write.
///
/// A file with a BlockFileOptions::name stays after the process has ended. Only the third of these points is true for
/// it, but its mode is 0600 too.
///
/// The object only holds the file; `IoRing` reads and writes it. The object must stay where it is, since transfers
/// point to it.
class BlockFile {
 public:
  /// Errors: those of `look_at_scratch_directory`; 71 if too many files are open; 74 if a file this large is not
  /// allowed, if the disk is full (the message has the bytes wanted and free), or if the disk failed; 65 if
  /// `must_be_there` is set and the file is missing or has another size; 70 if `bytes` is not a positive multiple of
  /// 4096.
  static absl::StatusOr<std::unique_ptr<BlockFile>> create(const BlockFileOptions& options);
  /// Syncs the file, so that its bytes and its name are on the disk itself. Errors: 74 if the sync fails.
  absl::Status sync(const std::string& who) const;
  ~BlockFile();
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;

  /// Returns a name such as "/scratch/tessera-scratch-4711-2", for messages and rules of a FaultPlan. A scratch file
  /// has no such path.
  const std::string& name() const { return name_; }
  const std::string& directory() const { return directory_; }
  std::int64_t bytes() const { return bytes_; }

  /// Returns whether reads and writes with `fd` go past the page cache. Offset, size and address must then be multiples
  /// of 4096.
  bool direct() const { return direct_; }
  /// Returns "O_DIRECT", or the reason why it is not used, such as "page cache, because tmpfs is memory already".
  const std::string& mode() const { return mode_; }

  int fd() const { return fd_; }
  /// Returns a descriptor that goes through the page cache, for the rest of a transfer that ended inside a block. It is
  /// equal to `fd` unless `direct`.
  int buffered_fd() const { return buffered_fd_; }

 private:
  BlockFile() = default;
  absl::Status open(const BlockFileOptions& options, bool in_memory);
  absl::Status open_kept(const BlockFileOptions& options);
  absl::Status take_room(const BlockFileOptions& options);
  absl::Status write_zeros(const BlockFileOptions& options);
  int try_direct(bool may_write);
  absl::Status error(const BlockFileOptions& options, const char* operation, int error, std::int64_t offset,
                     std::int64_t wanted, std::int64_t got) const;

  std::string name_, directory_, mode_;
  std::int64_t bytes_ = 0;
  bool direct_ = false;
  int fd_ = -1;
  int buffered_fd_ = -1;
  bool is_kept_ = false;    ///< whether the file has a name
  bool was_there_ = false;  ///< whether the file existed before, with its content
};

}  // namespace tessera
