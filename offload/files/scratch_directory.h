#pragma once

#include <absl/status/statusor.h>

#include <string>

namespace tessera {

/// The properties of a directory for scratch files.
struct ScratchDirectory {
  std::string path;
  bool in_memory = false;  ///< true: its file system is tmpfs or ramfs, whose files take memory instead of disk space
};

/// Looks at a directory before any file is made in it, so that a directory that cannot be used is an error before
/// training starts. If the directory is in memory, a warning says so, once for each directory.
///
/// Errors: 73 if it is missing, is no directory, or its file system is read-only; 77 if this user may not write there;
/// 78 if the path is empty.
absl::StatusOr<ScratchDirectory> look_at_scratch_directory(const std::string& path, const std::string& who);

}  // namespace tessera
