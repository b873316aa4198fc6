#include "offload/files/file_error.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <cerrno>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

/// Returns the bytes that this user may still write on the file system of `path`; -1 if the number is not available.
std::int64_t free_bytes_at(const std::string& path) {
  struct statvfs info {};
  if (::statvfs(path.c_str(), &info) != 0) return -1;
  return static_cast<std::int64_t>(info.f_bavail) * static_cast<std::int64_t>(info.f_frsize);
}

/// Returns a text such as " (4096 bytes free)" if the disk is full.
std::string room_left(const FileTrouble& trouble) {
  if ((trouble.error != ENOSPC && trouble.error != EDQUOT) || trouble.folder.empty()) return "";
  const std::int64_t free = free_bytes_at(trouble.folder);
  return free >= 0 ? fmt::format(" ({} bytes free)", free) : "";
}

std::string reason_and_hint(const FileTrouble& trouble) {
  if (trouble.error == 0)
    return "the file ended too early. [T0374] hint: something cut the file while it was in use; look for what cleans "
           "up that directory";
  return trouble.operation == "read" ? reason_of_reading(trouble.error)
                                     : reason_of_writing(trouble.error, trouble.wanted);
}

}  // namespace

absl::Status file_error(const FileTrouble& trouble) {
  std::string text = fmt::format("{}: {} of {}{}", trouble.who, trouble.operation, trouble.file, room_left(trouble));
  if (trouble.offset >= 0) text += fmt::format(" at offset {}", trouble.offset);
  if (trouble.wanted >= 0 && trouble.got >= 0) {
    text += fmt::format(": wanted {} bytes, got {}", trouble.wanted, trouble.got);
  } else if (trouble.wanted >= 0) {
    text += fmt::format(": wanted {} bytes", trouble.wanted);
  }
  text += ": " + reason_and_hint(trouble);
  // EAGAIN on a file means that the device was busy, not that there are too many processes.
  return make_error(trouble.error == EAGAIN ? ExitCode::kIo : exit_code_of_errno(trouble.error), text);
}

}  // namespace tessera
