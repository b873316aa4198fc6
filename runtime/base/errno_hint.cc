#include "runtime/base/errno_hint.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

#include "runtime/base/bytes.h"

namespace tessera {
namespace {

/// Returns a text such as ", which is 1024 here", or "" if there is no limit.
std::string which_is(decltype(RLIMIT_NOFILE) resource, bool in_bytes) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  const auto value = static_cast<std::int64_t>(limit.rlim_cur);
  return ", which is " + (in_bytes ? format_bytes(value) : fmt::to_string(value)) + " here";
}

std::string open_files() {
  return "[T0394] hint: raise the limit of open files (ulimit -n)" + which_is(RLIMIT_NOFILE, false);
}

std::string open_files_of_system() {
  return "[T0395] hint: raise the system's limit of open files (sysctl fs.file-max)";
}

std::string processes() {
  const std::string addresses = which_is(RLIMIT_AS, true);
  return "[T0396] hint: raise the limit of processes and threads (ulimit -u)" + which_is(RLIMIT_NPROC, false) +
         ", or that of the container (pids.max)" +
         (addresses.empty() ? ""
                            : "; a thread's stack counts to the limit of address space too (ulimit -v)" + addresses);
}

std::string memory() {
  const std::string addresses = which_is(RLIMIT_AS, true);
  return "[T0397] hint: ask for less, or raise the limit: memory is used up, or locked memory (ulimit -l)" +
         (addresses.empty() ? "" : ", or the address space (ulimit -v)" + addresses);
}

std::string file_size() {
  const std::string size = which_is(RLIMIT_FSIZE, true);
  return size.empty() ? "[T0398] hint: this file system holds no file so large; name a directory on another"
                      : "[T0399] hint: raise the limit of file sizes (ulimit -f)" + size;
}

constexpr const char* kBusy = "[T0400] hint: the device was busy at each try; name a path on another disk";
constexpr const char* kDisk = "[T0401] hint: the disk or file server failed (see dmesg); try another one";
constexpr const char* kFileInPath =
    "[T0402] hint: a part of this path is a file, not a folder: correct the path, or move that file away";
constexpr const char* kReadable = "[T0403] hint: let this user read it (chmod, chown), and enter the folders above it";
constexpr const char* kWritable = "[T0404] hint: name a folder that this user may write to";
constexpr const char* kSomethingElse =
    "[T0405] hint: something else stands in its place, such as a link or a socket: move it away, or give another name";
constexpr const char* kLinks =
    "[T0406] hint: links lead in a circle, or one stands where none is followed; remove it, or name another path";

/// The hint that tells a user how to react if reading or writing a file fails, and the limit to raise if a limit is the
/// cause. A member is null if the system's text needs no hint, or if another member has the hint.
struct Row {
  int error;
  ExitCode code;
  const char* reading = nullptr;
  const char* writing = nullptr;  ///< {} stands for the number of bytes wanted
  std::string (*limit)() = nullptr;
};

constexpr std::array kRows = {
    Row{ENOENT, ExitCode::kCannotCreate,
        "[T0407] hint: check the path; relative ones start at the folder the program was started in",
        "[T0408] hint: create its folder first (mkdir -p)"},
    Row{EACCES, ExitCode::kPermission, kReadable, kWritable},
    Row{EPERM, ExitCode::kPermission, kReadable, kWritable},
    Row{EROFS, ExitCode::kCannotCreate, nullptr,
        "[T0409] hint: the file system is mounted read-only; name another folder"},
    Row{EISDIR, ExitCode::kCannotCreate, "[T0410] hint: name the file itself",
        "[T0411] hint: a folder has this name; move it away, or name a file"},
    Row{EEXIST, ExitCode::kCannotCreate, nullptr, kSomethingElse},
    Row{ENOTDIR, ExitCode::kCannotCreate, kFileInPath, kFileInPath},
    Row{ENAMETOOLONG, ExitCode::kCannotCreate, "[T0412] hint: name a shorter path",
        "[T0413] hint: name a shorter path"},
    Row{ELOOP, ExitCode::kCannotCreate, kLinks, kLinks},
    Row{ENOSPC, ExitCode::kIo, nullptr, "[T0414] hint: free {} there, or name another folder"},
    Row{EDQUOT, ExitCode::kIo, nullptr, "[T0415] hint: this user's quota is used up; raise it, or name another folder"},
    Row{EBUSY, ExitCode::kIo, kBusy, kBusy},
    Row{EIO, ExitCode::kIo, kDisk, kDisk},
    Row{ESTALE, ExitCode::kIo, kDisk, kDisk},
    Row{ENODEV, ExitCode::kIo, kDisk, kDisk},
    Row{ENXIO, ExitCode::kCannotCreate, kDisk, kSomethingElse},
    Row{EMFILE, ExitCode::kOsResource, nullptr, nullptr, open_files},
    Row{ENFILE, ExitCode::kOsResource, nullptr, nullptr, open_files_of_system},
    Row{EAGAIN, ExitCode::kOsResource, kBusy, kBusy, processes},
    Row{ENOMEM, ExitCode::kOsResource, nullptr, nullptr, memory},
    Row{EFBIG, ExitCode::kIo, nullptr, nullptr, file_size},
};

const Row* row_of(int error) {
  const auto found = std::ranges::find(kRows, error, &Row::error);
  return found == kRows.end() ? nullptr : &*found;
}

std::string with_hint(int error, const std::string& hint) {
  return errno_text(error) + (hint.empty() ? "" : ". " + hint);
}

}  // namespace

std::string errno_text(int error) {
  return fmt::format("{} (errno {})", std::generic_category().message(error), error);
}

std::string limit_hint(int error) {
  const Row* const row = row_of(error);
  return row && row->limit ? row->limit() : "";
}

std::string reason_of(int error) { return with_hint(error, limit_hint(error)); }

std::string reason_of_reading(int error) {
  const Row* const row = row_of(error);
  return row && row->reading ? with_hint(error, row->reading) : reason_of(error);
}

std::string reason_of_writing(int error, std::int64_t wanted) {
  const Row* const row = row_of(error);
  if (!row || !row->writing) return reason_of(error);
  return with_hint(error, fmt::format(fmt::runtime(row->writing), wanted > 0 ? format_bytes(wanted) : "some space"));
}

int limit_in(std::string_view text) {
  for (const Row& row : kRows)
    if (row.limit && text.find(std::generic_category().message(row.error)) != std::string_view::npos) return row.error;
  return 0;
}

ExitCode exit_code_of_errno(int error) {
  const Row* const row = row_of(error);
  return row ? row->code : ExitCode::kIo;
}

ExitCode exit_code_of_creating(int error) {
  const Row* const row = row_of(error);
  if (error == EROFS) return ExitCode::kPermission;
  return row && (row->limit || row->code == ExitCode::kPermission) ? row->code : ExitCode::kCannotCreate;
}

}  // namespace tessera
