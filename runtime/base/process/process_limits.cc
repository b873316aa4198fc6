#include "runtime/base/process/process_limits.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace tessera {
namespace {

// A handler is used instead of SIG_IGN because exec resets handlers, so a program that this process starts has the
// signal's default.
void ignore_signal(int) {}

bool ignore_unless_handled(int signal) {
  struct sigaction there {};
  if (::sigaction(signal, nullptr, &there) != 0 || (there.sa_flags & SA_SIGINFO) != 0 || there.sa_handler != SIG_DFL)
    return false;
  struct sigaction ours {};
  ours.sa_handler = ignore_signal;
  ours.sa_flags = SA_RESTART;
  return ::sigaction(signal, &ours, nullptr) == 0;
}

}  // namespace

void turn_size_signal_into_error() { [[maybe_unused]] static const bool done = ignore_unless_handled(SIGXFSZ); }

void turn_pipe_signal_into_error() { [[maybe_unused]] static const bool done = ignore_unless_handled(SIGPIPE); }

void fill_standard_descriptors() {
  for (const int wanted : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(wanted, F_GETFD) >= 0 || errno != EBADF) continue;
    const int flags = wanted == STDIN_FILENO ? O_WRONLY : wanted == STDOUT_FILENO ? O_RDONLY : O_RDWR;
    const int fd = ::open("/dev/null", flags);  // started programs inherit it
    if (fd < 0 || fd == wanted) continue;
    ::dup2(fd, wanted);
    ::close(fd);
  }
}

void take_process_limits() {
  fill_standard_descriptors();
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

}  // namespace tessera
