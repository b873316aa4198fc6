#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "offload/files/file_place.h"
#include "runtime/base/process/owned_fd.h"

namespace tessera {

/// A file that may be damaged or hostile, open for reading. Only a regular file is opened. A link, a folder, a pipe or
/// a device is an error. The folder that the user named is trusted: it may be a link or lie behind one. None of the
/// `parts` of the path below that folder may be a link. A RegularFile is move-only.
///
/// Messages begin with `who` and the file. Errors: 66 if the file is missing; 77 without permission; 71 without free
/// descriptors or memory; 65 if it is a link or is not a regular file; 74 if a read fails or the file ends before the
/// wanted bytes.
class RegularFile {
 public:
  /// Opens the file. `who` is the prefix of messages: "rank 0". `parts`: the number of parts at the end of `path` that
  /// must not be links, 1 or more.
  static absl::StatusOr<RegularFile> open(const std::string& path, const std::string& who, int parts = 1);

  /// Returns the size that the file had when it was opened.
  std::int64_t bytes() const { return bytes_; }
  const std::string& path() const { return path_; }
  /// Fills all of `bytes` from byte `offset` on.
  absl::Status read(std::int64_t offset, std::span<std::byte> bytes) const;
  /// Tells the system that the file will be read from its beginning to its end, so that the system reads far ahead.
  void read_in_order() const;

 private:
  RegularFile(std::string path, std::string who, int fd, std::int64_t bytes)
      : path_(std::move(path)), who_(std::move(who)), fd_(fd), bytes_(bytes) {}

  std::string path_, who_;
  OwnedFd fd_;
  std::int64_t bytes_ = 0;
};

/// Returns the whole text of a small file, of at most `most_bytes`. Errors: those of RegularFile; 65 if the file is
/// larger.
absl::StatusOr<std::string> read_regular_text(const std::string& path, std::int64_t most_bytes, const std::string& who,
                                              int parts = 1);

/// Returns the `parts` with which RegularFile::open opens a file of a checkpoint. It is 2 if the checkpoint lies in a
/// folder of checkpoints under its own name ("step-..."), since a folder with this name must not be a link. It is 1 if
/// a user gave the checkpoint's folder another name.
int parts_of_checkpoint(const std::string& path);
/// Returns the place of a file of a checkpoint.
inline FilePlace in_checkpoint(const std::string& path) { return {path, parts_of_checkpoint(path)}; }

}  // namespace tessera
