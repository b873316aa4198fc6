#include "runtime/base/process_limits.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime/base/bytes.h"

namespace tessera {
namespace {

// A handler rather than SIG_IGN: exec takes it away, so a program that is started has the signal's default.
void ignore_signal(int) {}

bool install_handler() {
  struct sigaction there {};
  if (::sigaction(SIGXFSZ, nullptr, &there) != 0 || (there.sa_flags & SA_SIGINFO) != 0 || there.sa_handler != SIG_DFL)
    return false;
  struct sigaction ours {};
  ours.sa_handler = ignore_signal;
  ours.sa_flags = SA_RESTART;
  return ::sigaction(SIGXFSZ, &ours, nullptr) == 0;
}

/// ", which is 1024 here", or nothing where there is none.
std::string which_is(decltype(RLIMIT_NOFILE) resource, bool in_bytes) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  const auto value = static_cast<std::int64_t>(limit.rlim_cur);
  return ", which is " + (in_bytes ? format_bytes(value) : fmt::to_string(value)) + " here";
}

}  // namespace

void turn_size_signal_into_error() { [[maybe_unused]] static const bool installed = install_handler(); }

void take_process_limits() {
  turn_size_signal_into_error();
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

int try_threads(int count) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  int error = 0;
  try {
    for (int i = 0; i < count; ++i) threads.emplace_back([] {});
  } catch (const std::system_error& refusal) {
    error = refusal.code().value();
  }
  for (std::thread& thread : threads) thread.join();
  return error;
}

std::string errno_text(int error) {
  return fmt::format("{} (errno {})", std::generic_category().message(error), error);
}

std::string limit_hint(int error) {
  switch (error) {
    case EMFILE:
      return "hint: raise the limit of open files (ulimit -n)" + which_is(RLIMIT_NOFILE, false);
    case ENFILE:
      return "hint: raise the system's limit of open files (sysctl fs.file-max)";
    case EAGAIN: {
      const std::string addresses = which_is(RLIMIT_AS, true);
      return "hint: raise the limit of processes and threads (ulimit -u)" + which_is(RLIMIT_NPROC, false) +
             ", or that of the container (pids.max)" +
             (addresses.empty()
                  ? ""
                  : "; a thread's stack counts to the limit of address space too (ulimit -v)" + addresses);
    }
    case ENOMEM: {
      const std::string addresses = which_is(RLIMIT_AS, true);
      return "hint: memory or locked memory is used up (ulimit -l); ask for less, or raise the limit" +
             (addresses.empty() ? "" : "; so may be the limit of address space (ulimit -v)" + addresses);
    }
    case EFBIG: {
      const std::string size = which_is(RLIMIT_FSIZE, true);
      return size.empty() ? "hint: this file system holds no file so large; name a directory on another"
                          : "hint: raise the limit of file sizes (ulimit -f)" + size;
    }
    default:
      return "";
  }
}

std::string reason_of(int error) {
  const std::string hint = limit_hint(error);
  return errno_text(error) + (hint.empty() ? "" : ". " + hint);
}

int limit_in(std::string_view text) {
  for (const int error : {EMFILE, ENFILE, EAGAIN, ENOMEM, EFBIG})
    if (text.find(std::generic_category().message(error)) != std::string_view::npos) return error;
  return 0;
}

ExitCode exit_code_of_errno(int error) {
  switch (error) {
    case EACCES:
    case EPERM:
      return ExitCode::kPermission;
    case ENOMEM:
    case EMFILE:
    case ENFILE:
    case EAGAIN:
      return ExitCode::kOsResource;
    case ENOENT:
    case ENOTDIR:
    case EISDIR:
    case EEXIST:
    case EROFS:
    case ENAMETOOLONG:
    case ELOOP:
      return ExitCode::kCannotCreate;
    default:
      return ExitCode::kIo;
  }
}

}  // namespace tessera
