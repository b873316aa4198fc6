#pragma once

#include <absl/status/statusor.h>
#include <signal.h>

#include <string>
#include <vector>

#include "workshop/launch/rank_process.h"

namespace tessera {

struct JobSettings;

/// The system settings of a process that starts ranks: the launcher, and its agents on other hosts.

/// A folder for the ranks' error files. It exists as long as the object.
class ErrorDirectory {
 public:
  /// Makes the folder. The function fails with error 73 if the folder cannot be made in the folder for temporary files.
  static absl::StatusOr<ErrorDirectory> make();
  ErrorDirectory(ErrorDirectory&& other) noexcept;
  ~ErrorDirectory();

  const std::string& path() const { return path_; }

 private:
  explicit ErrorDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

/// Returns the files that `count` ranks may write: an error file for each rank, and a file that says that the rank has
/// joined the parameter servers. The first of the ranks is rank `first`.
std::vector<std::string> error_files(const JobSettings& job, int first, int count);

/// The process-wide settings of a process that starts ranks. Its destructor restores the old settings. If a process of
/// a rank loses its parent, it becomes a child of this process, and only this process reaps it. SIGPIPE is ignored.
/// SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 are blocked and can be read from `fd`.
class SignalScope {
 public:
  SignalScope();
  ~SignalScope();
  SignalScope(const SignalScope&) = delete;
  SignalScope& operator=(const SignalScope&) = delete;

  int fd() const { return fd_.get(); }
  const sigset_t& old_mask() const { return old_mask_; }

 private:
  OwnedFd fd_;
  sigset_t old_mask_;
  struct sigaction old_pipe_ {};
  struct sigaction old_child_ {};
  int was_subreaper_ = 0;
};

}  // namespace tessera
