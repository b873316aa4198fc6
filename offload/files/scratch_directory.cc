#include "offload/files/scratch_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>

#include "offload/files/file_error.h"
#include "offload/files/warn_once.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

absl::Status cannot_use(const std::string& who, const std::string& path, int error) {
  return file_error({.who = who, .operation = "use", .file = path, .error = error});
}

}  // namespace

absl::StatusOr<ScratchDirectory> look_at_scratch_directory(const std::string& path, const std::string& who) {
  if (path.empty())
    return make_error(
        ExitCode::kConfig,
        who + ": the path of the offload directory is empty. [T0378] hint: name a directory on a local disk");
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return cannot_use(who, path, errno);
  if (!S_ISDIR(info.st_mode)) return cannot_use(who, path, ENOTDIR);
  // The access rights of the effective user are checked, as they are when a file is opened.
  if (::faccessat(AT_FDCWD, path.c_str(), W_OK | X_OK, AT_EACCESS) != 0) return cannot_use(who, path, errno);
  struct statfs system {};
  if (::statfs(path.c_str(), &system) != 0) return cannot_use(who, path, errno);
  const bool in_memory = system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC;
  if (in_memory)
    warn_once("tmpfs " + path,
              fmt::format("{}: {} is a tmpfs: what is offloaded there stays in memory, and costs as much as it did "
                          "before. [T0379] hint: name a directory on a disk",
                          who, path));
  return ScratchDirectory{.path = path, .in_memory = in_memory};
}

}  // namespace tessera
