#include "workshop/launch/rank_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {

void read_some(OwnedFd& from, const std::function<void(std::string_view)>& take) {
  std::array<char, 64 << 10> buffer;
  for (int round = 0; round < 4 && from.is_open(); ++round) {
    const ssize_t got = ::read(from.get(), buffer.data(), buffer.size());
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return from.reset();
    take({buffer.data(), static_cast<std::size_t>(got)});
  }
}

int RankExit::code() const { return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status); }

std::optional<int> RankExit::signal() const {
  return WIFSIGNALED(wait_status) ? std::optional(WTERMSIG(wait_status)) : std::nullopt;
}

std::optional<RankExit> RankProcess::reap() const {
  RankExit result;
  rusage usage{};
  const pid_t got = ::wait4(pid, &result.wait_status, WNOHANG, &usage);
  if (got == 0 || (got < 0 && errno == EINTR)) return std::nullopt;
  if (got < 0) result.wait_status = W_EXITCODE(static_cast<int>(ExitCode::kInternal), 0);  // another process reaped it
  result.when = std::chrono::system_clock::now();
  result.peak_resident_bytes = static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
  return result;
}

void RankProcess::send(int signal) const { ::kill(-pid, signal); }

bool RankProcess::is_group_empty() const {
  while (::waitpid(-pid, nullptr, WNOHANG) > 0) {
  }
  return ::kill(-pid, 0) != 0 && errno == ESRCH;
}

bool RankProcess::is_stopped() const {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  std::getline(file, line);
  const auto name_end = line.rfind(')');  // the program's name may contain anything, even ") T"
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return false;
  return line[name_end + 2] == 'T' || line[name_end + 2] == 't';
}

namespace {

absl::Status os_error(const char* what, int error) {
  return make_error(ExitCode::kOsResource, fmt::format("launch: {}: {}", what, reason_of(error)));
}

struct Pipe {
  OwnedFd read, write;
};

absl::StatusOr<Pipe> make_pipe() {
  std::array<int, 2> ends;
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return os_error("no pipe", errno);
  return Pipe{OwnedFd(ends[0]), OwnedFd(ends[1])};
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (const std::string& text : texts) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

/// The data that the child needs. It is made before fork, since the child may make only system calls.
struct ChildPlan {
  char* const* argv;
  char* const* environment;
  const sigset_t* mask;
  pid_t launcher;
  int in, out, err;
  int failure;  ///< receives errno if the program cannot be started; closed by a successful exec
};

[[noreturn]] void become_program(const ChildPlan& plan) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != plan.launcher) ::_exit(128 + SIGKILL);  // the launcher died before the line above
  ::dup2(plan.in, 0);
  ::dup2(plan.out, 1);
  ::dup2(plan.err, 2);
  ::signal(SIGPIPE, SIG_DFL);  // the launcher ignores SIGPIPE, which the program would inherit
  ::sigprocmask(SIG_SETMASK, plan.mask, nullptr);
  ::execvpe(plan.argv[0], plan.argv, plan.environment);
  const int error = errno;
  [[maybe_unused]] const ssize_t told = ::write(plan.failure, &error, sizeof error);
  ::_exit(127);
}

/// Returns the hint for a program that could not be started. "No such file" for a script means that its interpreter is
/// missing.
std::string hint_of_start(const std::string& program, int error) {
  std::error_code ignored;
  switch (error) {
    case ENOENT:
      return std::filesystem::exists(program, ignored)
                 ? ". [T0601] hint: its first line (#!) names an interpreter that is not there"
                 : ". [T0602] hint: give its path, or put its folder in PATH";
    case ENOTDIR:
      return ". [T0603] hint: a part of this path is a file, not a folder";
    case EACCES:
    case EPERM:
      return ". [T0604] hint: the file must be a program that may be executed (chmod +x)";
    case ENOEXEC:
      return ". [T0605] hint: it is neither a program of this machine's kind nor a script that begins with #!";
    case ENAMETOOLONG:
      return ". [T0606] hint: give a shorter path";
    case E2BIG:
      return ". [T0607] hint: shorten its arguments or the environment";
    default:
      return limit_hint(error).empty() ? "" : ". " + limit_hint(error);
  }
}

absl::Status exec_error(const std::string& program, int error) {
  std::error_code ignored;
  if (std::filesystem::is_directory(program, ignored) && program.find('/') != std::string::npos)
    return make_error(
        ExitCode::kPermission,
        fmt::format("launch: cannot start {}: is a directory. [T0608] hint: name the program itself", program));
  const ExitCode code = error == ENOENT || error == ENOTDIR   ? ExitCode::kNoInput
                        : error == EACCES || error == ENOEXEC ? ExitCode::kPermission
                                                              : ExitCode::kOsResource;
  return make_error(code, fmt::format("launch: cannot start {}: {}{}", clipped(program, 200),
                                      std::generic_category().message(error), hint_of_start(program, error)));
}

/// Waits until the child has become the program. Returns 0, or the child's errno.
int wait_for_exec(int failure) {
  int error = 0;
  ssize_t got;
  do {
    got = ::read(failure, &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  return got == static_cast<ssize_t>(sizeof error) ? error : 0;
}

}  // namespace

absl::StatusOr<RankProcess> start_rank(const std::vector<std::string>& command,
                                       const std::vector<std::string>& environment, const sigset_t& mask,
                                       StandardInput input) {
  TESSERA_ASSIGN_OR_RETURN(Pipe out, make_pipe());
  TESSERA_ASSIGN_OR_RETURN(Pipe err, make_pipe());
  TESSERA_ASSIGN_OR_RETURN(Pipe failure, make_pipe());
  Pipe in;
  if (input == StandardInput::kPipe) {
    TESSERA_ASSIGN_OR_RETURN(in, make_pipe());
  } else {
    in.read = OwnedFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!in.read.is_open()) return os_error("cannot open /dev/null", errno);
  }
  const auto argv = pointers(command);
  const auto variables = pointers(environment);
  const ChildPlan plan = {argv.data(),   variables.data(), &mask,           ::getpid(),
                          in.read.get(), out.write.get(),  err.write.get(), failure.write.get()};
  RankProcess rank;
  rank.pid = ::fork();
  if (rank.pid == 0) become_program(plan);
  if (rank.pid < 0) return os_error("no process", errno);
  ::setpgid(rank.pid, rank.pid);  // both processes make this call, since either may be first
  failure.write.reset();
  if (const int error = wait_for_exec(failure.read.get()); error != 0) {
    ::waitpid(rank.pid, nullptr, 0);
    return exec_error(command.front(), error);
  }
  rank.exited = OwnedFd(static_cast<int>(::syscall(SYS_pidfd_open, rank.pid, 0)));
  rank.out = std::move(out.read);
  rank.err = std::move(err.read);
  rank.in = std::move(in.write);
  for (const OwnedFd* end : {&rank.out, &rank.err, &rank.in})
    if (end->is_open()) ::fcntl(end->get(), F_SETFL, O_NONBLOCK);
  if (rank.exited.is_open()) return rank;
  const int error = errno;
  rank.send(SIGKILL);
  ::waitpid(rank.pid, nullptr, 0);
  return os_error("cannot watch a process", error);
}

}  // namespace tessera
