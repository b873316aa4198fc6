#pragma once

#include <absl/status/statusor.h>

#include <string>

namespace tessera {

/// The properties of a directory for scratch files.
struct ScratchDirectory {
  std::string path;
  bool in_memory = false;  ///< whether it is a tmpfs or ramfs, whose files take memory and no disk
};

/// Looks at a directory before anything is made in it, so that a directory that cannot be used is an error before
/// training starts. Warns, once a directory, if it is in memory.
/// Errors: 73 it is missing, is no directory, or its file system is read-only; 77 this user may not write there;
/// 78 an empty path.
absl::StatusOr<ScratchDirectory> look_at_scratch_directory(const std::string& path, const std::string& who);

}  // namespace tessera
