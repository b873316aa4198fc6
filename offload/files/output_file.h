#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/existing.h"

namespace tessera {

/// Returns the name that a result at `path` has until it is complete.
std::filesystem::path partial_of(const std::filesystem::path& path);

/// Creates the file `partial` for writing, and returns its descriptor. If that fails, returns -1 and sets errno. A
/// regular file that another run left there is removed without being opened, since the file may have a second name (a
/// hard link). Links are not followed.
int create_partial(const std::filesystem::path& partial);

/// Returns the error "<what>: <the system's reason>" with the code 73 if the file cannot be created, 77 if a permission
/// is missing, or 71 or 74 if a limit of the process is reached (errno_hint.h). `error` is an errno.
absl::Status cannot_create(const std::string& what, int error);

/// A result that is written piece by piece to "<path>.partial". The file gets its name when it is complete and on the
/// disk, so a file with this name is always whole. Symbolic links are not followed. The destructor removes a file that
/// was not finished.
///
/// It is meant for large results of a user, which have a well-known partial name and the umask's mode.
/// write_file_atomically is meant for small files that must survive a power loss.
class OutputFile {
 public:
  /// Messages begin with `what`. Errors: 73 if the file cannot be created; 77 without permission.
  static absl::StatusOr<OutputFile> create(const std::filesystem::path& path, const std::string& what);
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();

  /// Appends bytes to the file. Errors: 74 if a write fails or the disk is full.
  absl::Status append(std::string_view bytes);

  /// Syncs, closes and renames. If a file with the name has appeared meanwhile and `existing` is Existing::kKept, that
  /// file is not changed: the bytes stay in "<path>.partial", and the error says so. Errors: 74 if a write or sync
  /// failed; 73 if the file cannot be renamed, or a file with its name is kept; 77 without permission. REQUIRES: it is
  /// called once, and all appends have succeeded.
  absl::Status finish(Existing existing);

 private:
  OutputFile(std::filesystem::path path, std::filesystem::path partial, std::string what, int fd)
      : path_(std::move(path)), partial_(std::move(partial)), what_(std::move(what)), fd_(fd) {}
  absl::Status write_error(int error) const;
  absl::Status rename(Existing existing);

  std::filesystem::path path_, partial_;
  std::string what_;
  int fd_;
  bool is_kept_ = false;  ///< whether the destructor must not remove the partial file
};

}  // namespace tessera
