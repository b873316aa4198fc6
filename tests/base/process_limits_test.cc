// Tests that limits and signals of the process become errors, each in a child process.

#include "runtime/base/process/process_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <string>
#include <vector>

#include "runtime/base/errno_hint.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// Runs `is_right` in a child process, because limits belong to a process. Returns the child's wait status.
int in_child(const std::function<bool()>& is_right) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(is_right() ? 0 : 1);
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

bool set(decltype(RLIMIT_FSIZE) resource, rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  return ::setrlimit(resource, &limit) == 0;
}

TEST(ProcessLimits, WriteBeyondTheFileSizeLimitIsAnError) {
  EXPECT_EQ(in_child([] {
              turn_size_signal_into_error();
              const int fd = ::memfd_create("limited", MFD_CLOEXEC);
              if (fd < 0 || !set(RLIMIT_FSIZE, 8, RLIM_INFINITY)) return false;
              return ::write(fd, "0123456789", 10) == 8 && ::write(fd, "8", 1) < 0 && errno == EFBIG &&
                     limit_hint(EFBIG).find("(ulimit -f), which is 8 B here") != std::string::npos;
            }),
            0);
}

TEST(ProcessLimits, WriteToAGonePeerIsAnError) {
  EXPECT_EQ(in_child([] {
              int ends[2];
              if (::pipe(ends) != 0) return false;
              ::close(ends[0]);
              turn_pipe_signal_into_error();
              return ::write(ends[1], "x", 1) < 0 && errno == EPIPE;
            }),
            0);
}

TEST(ProcessLimits, StartedProgramGetsTheDefaultSizeSignal) {
  const int status = in_child([] {
    turn_size_signal_into_error();
    ::execl("/bin/sh", "sh", "-c", "kill -s XFSZ $$", nullptr);
    return false;
  });
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGXFSZ);
}

TEST(ProcessLimits, ProgramsOwnSignalHandlerStays) {
  EXPECT_EQ(in_child([] {
              ::signal(SIGXFSZ, SIG_IGN);
              turn_size_signal_into_error();
              return ::signal(SIGXFSZ, SIG_DFL) == SIG_IGN;
            }),
            0);
}

TEST(ProcessLimits, SoftDescriptorLimitIsRaisedToTheHardOne) {
  EXPECT_EQ(in_child([] {
              rlimit limit{};
              if (!set(RLIMIT_NOFILE, 20, 40)) return false;
              take_process_limits();
              return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur == 40 && limit.rlim_max == 40 &&
                     limit_hint(EMFILE).ends_with("hint: raise the limit of open files (ulimit -n), which is 40 here");
            }),
            0);
}

// "program <&- >&- 2>&-"; what is printed must not reach the next file that is opened.
TEST(ProcessLimits, ClosedStandardDescriptorsAreNoOtherFiles) {
  for (const std::vector<int>& closed : {std::vector<int>{1, 2}, {0, 1, 2}, {1}, {0, 2}}) {
    EXPECT_EQ(in_child([&] {
                for (const int fd : closed) ::close(fd);
                take_process_limits();
                const int file = ::memfd_create("file", MFD_CLOEXEC);
                char byte = 0;
                bool fails = file > STDERR_FILENO;
                for (const int fd : closed) {
                  if (fd != STDERR_FILENO)
                    fails = fails && (fd == 0 ? ::read(fd, &byte, 1) : ::write(fd, "x", 1)) < 0 && errno == EBADF;
                }
                return fails;
              }),
              0);
  }
}

TEST(ProcessLimits, RefusedThreadsReturnEagain) {
  EXPECT_EQ(try_threads(3), 0);
  EXPECT_THAT(limit_hint(EAGAIN), HasSubstr("processes and threads (ulimit -u)"));
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer needs addresses itself";
#endif
  // Each thread's stack needs addresses, and no addresses are left. Only a few stacks of ended threads are used again.
  EXPECT_EQ(in_child([] { return set(RLIMIT_AS, 1 << 20, RLIM_INFINITY) && try_threads(64) == EAGAIN; }), 0);
}

}  // namespace
}  // namespace tessera
