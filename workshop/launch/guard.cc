#include "workshop/launch/guard.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <utility>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr pid_t kGoHome = 0;  // ends the guard; no process group has this number

/// Runs the guard, from fork to _exit. It only makes system calls, since the parent may have had threads.
[[noreturn]] void keep_guard(int pipe, const char* directory, const std::vector<const char*>& files) {
  static constexpr std::size_t kMostGroups = 4096;
  static std::array<pid_t, kMostGroups> groups;  // these are static, since a guard is a process of its own
  std::size_t count = 0;
  pid_t message = 0;
  while (true) {
    const ssize_t got = ::read(pipe, &message, sizeof message);
    if (got < 0 && errno == EINTR) continue;
    if (got != static_cast<ssize_t>(sizeof message)) break;  // the pipe's end means that the launcher is gone
    if (message == kGoHome) ::_exit(0);
    if (message > 0 && count < kMostGroups) groups[count++] = message;
    for (std::size_t i = 0; message < 0 && i < count; ++i)
      if (groups[i] == -message) groups[i--] = groups[--count];
  }
  for (std::size_t i = 0; i < count; ++i) ::kill(-groups[i], SIGKILL);
  for (const char* file : files) ::unlink(file);
  ::rmdir(directory);
  ::_exit(0);
}

/// Leaves the launcher's terminal and session, and closes the files that were inherited from the launcher.
void detach(int keep) {
  ::setsid();
  ::signal(SIGPIPE, SIG_IGN);
  const int null = ::open("/dev/null", O_RDWR);
  for (int fd = 0; fd <= 2 && null >= 0; ++fd) ::dup2(null, fd);
  if (keep > 3) ::close_range(3, static_cast<unsigned>(keep) - 1, 0);
  ::close_range(static_cast<unsigned>(keep) + 1, ~0U, 0);
}

}  // namespace

absl::StatusOr<Guard> Guard::start(const std::string& error_directory, const std::vector<std::string>& error_files) {
  std::vector<const char*> files;
  for (const std::string& file : error_files) files.push_back(file.c_str());
  std::array<int, 2> ends;
  if (::pipe2(ends.data(), O_CLOEXEC) != 0)
    return make_error(ExitCode::kOsResource, "launch: no pipe: " + reason_of(errno));
  const pid_t pid = ::fork();
  if (pid == 0) {
    detach(ends[0]);  // this closes ends[1] too
    keep_guard(ends[0], error_directory.c_str(), files);
  }
  ::close(ends[0]);
  if (pid > 0) return Guard(pid, ends[1]);
  ::close(ends[1]);
  return make_error(ExitCode::kOsResource, "launch: no process: " + reason_of(errno));
}

Guard::Guard(Guard&& other) noexcept : pid_(std::exchange(other.pid_, -1)), pipe_(std::exchange(other.pipe_, -1)) {}

Guard::~Guard() {
  if (pid_ < 0) return;
  tell(kGoHome);
  ::close(pipe_);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guard::watch(pid_t group) { tell(group); }
void Guard::forget(pid_t group) { tell(-group); }

void Guard::tell(pid_t message) {
  while (::write(pipe_, &message, sizeof message) < 0 && errno == EINTR) {
  }
}

}  // namespace tessera
