#include "checkpoint/files/folder_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <thread>

#include "offload/files/fault_environment.h"
#include "offload/files/file_calls.h"
#include "offload/files/file_error.h"
#include "offload/files/retries.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kMostHolderBytes = 200;
constexpr std::chrono::milliseconds kBetweenTries{20};

/// Returns a text about this process, such as "process 4711 on node-3".
std::string this_process() {
  char host[100] = "";
  if (::gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
  return fmt::format("process {}{}{}", ::getpid(), *host ? " on " : "", host);
}

/// Returns the text that the holder wrote into the file. The text may be out of date. Returns "another process" if the
/// file has no such text.
std::string holder_of(int fd) {
  char text[kMostHolderBytes];
  const ssize_t got = ::pread(fd, text, sizeof text, 0);
  std::string holder(text, static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  holder.resize(std::min(holder.find('\n'), holder.size()));
  const bool is_text = std::ranges::all_of(holder, [](char c) { return c >= ' ' && c <= '~'; });
  return holder.empty() || !is_text ? "another process" : holder;
}

/// Writes a text about the holder. Only messages of other processes use it, so writing it may fail.
void write_holder(int fd) {
  const std::string line = this_process() + "\n";
  if (::ftruncate(fd, 0) == 0) (void)!::pwrite(fd, line.data(), line.size(), 0);
}

}  // namespace

absl::StatusOr<FolderLock> FolderLock::take(const FilePlace& file, const std::string& does, const std::string& who,
                                            std::chrono::milliseconds patience) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  const std::string& path = file.path();
  const int got = retried([&] { return file_calls::open(file, O_CREAT | O_RDWR | O_CLOEXEC, 0600); });
  if (got < 0)
    return file_error({.who = who,
                       .operation = "create",
                       .file = path,
                       .folder = std::filesystem::path(path).parent_path().string(),
                       .error = -got});
  FolderLock lock(got);
  // The file's text will be overwritten, so the file must have no other name (hard link).
  struct stat info {};
  if (::fstat(got, &info) != 0 || !S_ISREG(info.st_mode) || info.st_nlink > 1)
    return make_error(ExitCode::kCannotCreate,
                      fmt::format("{}: {} is no file of this folder alone, but a pipe, a device, or a file that has "
                                  "another name too. [T0073] hint: remove it",
                                  who, path));
  const auto until = std::chrono::steady_clock::now() + patience;
  while (::flock(got, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) {
      log_warning(fmt::format("{}: {} cannot be locked here ({}); see to it that one run alone saves there", who, path,
                              errno_text(errno)));
      return lock;
    }
    if (std::chrono::steady_clock::now() >= until)
      return make_error(
          ExitCode::kUnavailable,
          fmt::format("{}: another process {} now: {} holds {}. [T0074] hint: give each run a folder of its own", who,
                      does, holder_of(got), path));
    std::this_thread::sleep_for(kBetweenTries);
  }
  write_holder(got);
  return lock;
}

void FolderLock::forget() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

FolderLock::~FolderLock() {
  if (fd_ < 0) return;
  // A process that was forked meanwhile has a copy of the descriptor, and close() alone would leave the lock with it.
  ::flock(fd_, LOCK_UN);
  ::close(fd_);
}

}  // namespace tessera
