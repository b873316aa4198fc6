#include "workshop/launch/process_scope.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"
#include "workshop/launch/rank_environment.h"

namespace tessera {

absl::StatusOr<ErrorDirectory> ErrorDirectory::make() {
  std::error_code error;
  auto root = std::filesystem::temp_directory_path(error);
  if (error) root = "/tmp";
  std::string name = (root / "tessera-launch-XXXXXX").string();
  if (!::mkdtemp(name.data()))
    return make_error(ExitCode::kCannotCreate, fmt::format("launch: cannot create {}: {}. [T0599] hint: set TMPDIR "
                                                           "to a folder with room that this user may write to",
                                                           name, errno_text(errno)));
  return ErrorDirectory(name);
}

ErrorDirectory::ErrorDirectory(ErrorDirectory&& other) noexcept : path_(std::exchange(other.path_, {})) {}

ErrorDirectory::~ErrorDirectory() {
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> error_files(const JobSettings& job, int first, int count) {
  std::vector<std::string> files;
  for (int rank = first; rank < first + count; ++rank) {
    files.push_back(job.error_file(rank));
    files.push_back(job.joined_file(rank));
  }
  return files;
}

SignalScope::SignalScope() {
  sigset_t taken;
  ::sigemptyset(&taken);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1}) ::sigaddset(&taken, signal);
  ::pthread_sigmask(SIG_BLOCK, &taken, &old_mask_);
  fd_ = OwnedFd(::signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &old_pipe_);
  struct sigaction standard {};  // with SIGCHLD's default, the kernel leaves children for this process to reap
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &standard, &old_child_);
  ::prctl(PR_GET_CHILD_SUBREAPER, &was_subreaper_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

SignalScope::~SignalScope() {
  ::prctl(PR_SET_CHILD_SUBREAPER, was_subreaper_);
  ::sigaction(SIGCHLD, &old_child_, nullptr);
  ::sigaction(SIGPIPE, &old_pipe_, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

}  // namespace tessera
