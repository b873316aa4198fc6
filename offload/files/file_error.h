#pragma once

#include <absl/status/status.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "runtime/base/errno_hint.h"  // has exit_code_of_errno and errno_text

namespace tessera {

/// The parts of a message about a failed file operation. A negative number means that the operation has no such number.
struct FileTrouble {
  std::string_view who;        ///< the part of the program that made the operation, such as "rank 0 optimizer state"
  std::string_view operation;  ///< "read", "write", "fsync", ...
  std::string_view file;
  /// If the disk is full, the free space of this folder's file system is shown; an empty name: no free space is shown.
  std::string folder = {};
  std::int64_t offset = -1;  ///< offset in the file, in bytes
  std::int64_t wanted = -1;  ///< number of bytes that were wanted
  std::int64_t got = -1;     ///< number of bytes that were transferred
  int error = 0;             ///< an errno; 0: the file ended before the wanted data
};

/// Returns an error such as "rank 0 optimizer state: write of /scratch (scratch file) at offset 8192: wanted 4096
/// bytes, got 0: No space left on device (errno 28). hint: free 4.00 KiB there, or name another folder". The
/// exit code is that of exit_code_of_errno, except that EAGAIN gets 74.
absl::Status file_error(const FileTrouble& trouble);

}  // namespace tessera
