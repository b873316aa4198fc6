#include "offload/file_error.h"

#include <fmt/format.h>
#include <sys/statvfs.h>

#include <cerrno>

#include "runtime/base/bytes.h"
#include "runtime/base/process_limits.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

std::string hint_for(const FileTrouble& trouble) {
  switch (trouble.error) {
    case 0:
      return "hint: something cut the file while it was in use; look for what cleans up that directory";
    case ENOSPC:
      return fmt::format("hint: free {} there, or name another directory",
                         trouble.wanted > 0 ? format_bytes(trouble.wanted) : std::string("some space"));
    case EDQUOT:
      return "hint: this user's quota is used up; raise it, or name another directory";
    case EIO:
      return "hint: the device reported an error (see dmesg); name a directory on another disk";
    case EACCES:
    case EPERM:
      return "hint: name a directory that this user may write to";
    case EROFS:
      return "hint: the file system is mounted read-only; name another directory";
    case ENOENT:
      return "hint: create the directory first";
    case ENOTDIR:
      return "hint: name a directory, not a file";
    case ENAMETOOLONG:
      return "hint: name a shorter path";
    case ELOOP:
      return "hint: a link stands in its place, and links are not followed: remove it, or name another directory";
    case EEXIST:
    case ENXIO:
      return "hint: something else stands in its place, such as a link or a socket: move it away, or give another name";
    case EISDIR:
      return "hint: a directory stands in its place: move it away, or give another name";
    case EAGAIN:
    case EBUSY:
      return "hint: the device was busy at each try; name a directory on another disk";
    default:
      return limit_hint(trouble.error);
  }
}

/// Bytes that this user may still write on the file system of `path`; -1 if that cannot be asked.
std::int64_t free_bytes_at(const std::string& path) {
  struct statvfs info {};
  if (::statvfs(path.c_str(), &info) != 0) return -1;
  return static_cast<std::int64_t>(info.f_bavail) * static_cast<std::int64_t>(info.f_frsize);
}

/// " (4096 bytes free)" where a full disk is the trouble.
std::string room_left(const FileTrouble& trouble) {
  if ((trouble.error != ENOSPC && trouble.error != EDQUOT) || trouble.folder.empty()) return "";
  const std::int64_t free = free_bytes_at(trouble.folder);
  return free >= 0 ? fmt::format(" ({} bytes free)", free) : "";
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
  text += ": " + (trouble.error == 0 ? std::string("the file ended too early") : errno_text(trouble.error));
  if (const std::string hint = hint_for(trouble); !hint.empty()) text += ". " + hint;
  // EAGAIN of a file says that the device was busy, and not that there are too many processes.
  return make_error(trouble.error == EAGAIN ? ExitCode::kIo : exit_code_of_errno(trouble.error), text);
}

}  // namespace tessera
