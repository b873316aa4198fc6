#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <filesystem>
#include <string>

#include "runtime/base/process/owned_fd.h"
#include "tessera/exit_code.h"

namespace tessera {

/// These functions read a file that a user named as an input, and never wait for ever. A directory or an endless device
/// is an error at once. A pipe that nobody writes to is an error after kPipeSeconds. Readers of strategies, models,
/// data sets and weights use these functions.

/// Seconds for which a reader waits for a silent pipe.
inline constexpr int kPipeSeconds = 3;

/// A regular file that is open for reading, and the size that it had when it was opened.
class InputFile {
 public:
  /// `kind` is a word for the file at the beginning of messages, such as "model file"; it may be empty. Errors: 66 if
  /// the file is missing, 77 if permission is missing, 65 for a directory, pipe or device, 71 if too many files are
  /// open, 64 if the path is empty, 74 for everything else.
  static absl::StatusOr<InputFile> open(const std::filesystem::path& path, const std::string& kind);

  int fd() const { return fd_.get(); }
  std::size_t size() const { return size_; }

 private:
  InputFile(int fd, std::size_t size) : fd_(fd), size_(size) {}
  OwnedFd fd_;
  std::size_t size_;
};

/// Reads the whole text of a file or pipe of at most `most_bytes`. A larger file is taken to be of another kind, and
/// fails with `too_large` (78 for files that configure a run, 65 for data). Memory is allocated for the bytes that the
/// file has, not for `most_bytes`. Other errors are those of InputFile::open, and 65 if a pipe is silent for
/// kPipeSeconds.
absl::StatusOr<std::string> read_input_file(const std::filesystem::path& path, const std::string& kind,
                                            std::size_t most_bytes, ExitCode too_large = ExitCode::kConfig);

/// Reads the file `name` in a folder that a user named, as read_input_file does. The folder may be a link. The file may
/// not be a link (65), since a stranger may have made the folder.
absl::StatusOr<std::string> read_input_file_in(const std::filesystem::path& folder, const std::string& name,
                                               const std::string& kind, std::size_t most_bytes,
                                               ExitCode too_large = ExitCode::kConfig);

/// Returns the error "model file x.json: cannot be opened: No such file or directory (errno 2)", with the exit code for
/// `error`, an errno.
absl::Status input_error(const std::filesystem::path& path, const std::string& kind, const char* what, int error);

}  // namespace tessera
