// with_patience SECONDS COMMAND...: runs a command as a test that has a limit of time. The limit is SECONDS on a
// machine at rest, and grows with the load (patience.h). ctest's own limit does not grow with the load. The command has
// its own process group, which is killed at the limit. This program ends with the exit code or signal of the command.
// The threads of OpenMP sleep while they wait, since other tests need the cores.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "tests/support/limits/patience.h"

namespace tessera {
namespace {

constexpr int kLate = 124;  // timeout(1) has the same exit code
constexpr int kCannotRun = 126;

/// Ends this process in the way in which the command ended.
int end_like(int status) {
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  const int number = WTERMSIG(status);
  ::prctl(PR_SET_DUMPABLE, 0);  // this program writes no core file, since the command has already written one
  ::signal(number, SIG_DFL);
  ::raise(number);
  return 128 + number;
}

int run(double at_rest_s, char** command) {
  sigset_t handled, before;
  ::sigemptyset(&handled);
  for (const int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&handled, number);
  ::sigprocmask(SIG_BLOCK, &handled, &before);
  const pid_t pid = ::fork();
  if (pid < 0) {
    std::perror("with_patience: fork");
    return kCannotRun;
  }
  if (pid == 0) {
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    ::setenv("OMP_WAIT_POLICY", "passive", /*overwrite=*/0);  // threads that wait leave their cores to other tests
    ::execvp(command[0], command);
    std::perror(command[0]);
    ::_exit(127);
  }
  Deadline limit{std::chrono::duration<double>(at_rest_s)};
  while (true) {
    int status = 0;
    if (::waitpid(pid, &status, WNOHANG) == pid) {
      ::sigprocmask(SIG_SETMASK, &before, nullptr);
      return end_like(status);
    }
    if (limit.passed()) break;
    const timespec second{1, 0};
    const int number = ::sigtimedwait(&handled, nullptr, &second);
    if (number > 0 && number != SIGCHLD) ::kill(-pid, number);
  }
  std::fprintf(stderr,
               "with_patience: %s has not ended after %.3g s. It may take %g s on a machine at rest, and things take "
               "%.1f times as long here.\n",
               command[0], limit.seconds(), at_rest_s, slowness());
  ::kill(-pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  return kLate;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  const double at_rest_s = argc > 2 ? std::atof(argv[1]) : 0;
  if (at_rest_s > 0) return tessera::run(at_rest_s, argv + 2);
  std::fputs("with_patience SECONDS COMMAND...\n", stderr);
  return tessera::kCannotRun;
}
