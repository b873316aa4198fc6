#include "workshop/launch/launcher.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <thread>

#include "runtime/base/errno_hint.h"
#include "runtime/base/process_limits.h"
#include "runtime/base/status.h"
#include "workshop/launch/supervisor.h"

namespace tessera {
namespace {

constexpr int kMostRanks = 1024;  // ranks on one machine; more is a slip of the finger

absl::Status check(const LaunchOptions& options) {
  const auto refuse = [](const std::string& what) { return make_error(ExitCode::kUsage, "launch: " + what); };
  if (options.command.empty() || options.command.front().empty())
    return refuse(
        "no program given. [T0591] hint: name it behind \"--\", as in tessera launch -n 4 -- ./train strategy.json");
  if (options.ranks < 1 || options.ranks > kMostRanks)
    return refuse(fmt::format("the number of ranks must be 1 to {}, got {}. [T0592] hint: -n says how many", kMostRanks,
                              options.ranks));
  if (options.hosts < 1 || options.ranks % options.hosts != 0)
    return refuse(
        fmt::format("{} pretended hosts do not divide {} ranks. [T0593] hint: give -n a multiple of "
                    "--pretend-hosts",
                    options.hosts, options.ranks));
  if (options.port < 0 || options.port > 65535)
    return refuse(
        fmt::format("port {} is outside of 0 to 65535. [T0594] hint: --port 0 takes a free one", options.port));
  if (options.max_restarts < 0)
    return refuse(fmt::format("{} restarts make no sense. [T0595] hint: --max-restarts 0 starts ranks once",
                              options.max_restarts));
  for (const double time : {options.grace_s, options.term_s})
    if (!(time >= 0 && time <= 1e6))
      return refuse(
          fmt::format("a time of {} s makes no sense. [T0596] hint: give --grace from 0 to a million seconds", time));
  return absl::OkStatus();
}

/// A port of the loopback interface that this job has while the object lives. It is bound here and nobody listens, so
/// the system gives it to no other program, while rank 0 may bind it and listen: both set SO_REUSEADDR, as c10d does.
class HeldPort {
 public:
  /// Takes `port`; 0 takes any free one.
  static absl::StatusOr<HeldPort> take(int port) {
    HeldPort held;
    held.socket_ = OwnedFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int fd = held.socket_.get();
    if (!held.socket_.is_open()) return make_error(ExitCode::kOsResource, "launch: no socket: " + reason_of(errno));
    const int on = 1;  // connections of an ended job do not count as a port in use
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    socklen_t length = sizeof address;
    const auto raw = reinterpret_cast<sockaddr*>(&address);
    if (::bind(fd, raw, length) != 0)
      return make_error(
          ExitCode::kUnavailable,
          fmt::format(
              "launch: cannot use port {} of 127.0.0.1: {}. [T0597] hint: give another --port, or 0 for a free one",
              port, std::generic_category().message(errno)));
    if (::getsockname(fd, raw, &length) != 0)
      return make_error(ExitCode::kOsResource,
                        "launch: the system does not tell which port it chose. [T0598] hint: name one by --port");
    held.port_ = ntohs(address.sin_port);
    return held;
  }

  int number() const { return port_; }

 private:
  HeldPort() = default;

  OwnedFd socket_;
  int port_ = 0;
};

/// A folder for the ranks' error files that lives as long as the object.
class ErrorDirectory {
 public:
  static absl::StatusOr<ErrorDirectory> make() {
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
  ErrorDirectory(ErrorDirectory&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  ~ErrorDirectory() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit ErrorDirectory(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

/// The process-wide settings that a launcher changes; it restores them.
class SignalScope {
 public:
  SignalScope() {
    sigset_t taken;
    ::sigemptyset(&taken);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1}) ::sigaddset(&taken, signal);
    ::pthread_sigmask(SIG_BLOCK, &taken, &old_mask_);
    fd_ = OwnedFd(::signalfd(-1, &taken, SFD_CLOEXEC | SFD_NONBLOCK));
    struct sigaction ignore {};
    ignore.sa_handler = SIG_IGN;
    ::sigaction(SIGPIPE, &ignore, &old_pipe_);
    struct sigaction standard {};  // only the launcher may reap its children
    standard.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &standard, &old_child_);
    ::prctl(PR_GET_CHILD_SUBREAPER, &was_subreaper_);
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  }
  ~SignalScope() {
    ::prctl(PR_SET_CHILD_SUBREAPER, was_subreaper_);
    ::sigaction(SIGCHLD, &old_child_, nullptr);
    ::sigaction(SIGPIPE, &old_pipe_, nullptr);
    ::pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
  }
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

/// A caller may have closed 0, 1 or 2; a pipe that took such a number would be lost when the ranks get theirs.
void fill_standard_descriptors() {
  int fd = ::open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= 2) fd = ::open("/dev/null", O_RDWR);
  if (fd > 2) ::close(fd);
}

std::vector<std::string> error_files(const JobSettings& job, int ranks) {
  std::vector<std::string> files;
  for (int rank = 0; rank < ranks; ++rank) files.push_back(job.error_file(rank));
  return files;
}

/// One run of all ranks, from their start to the end of all.
struct Attempt {
  int code = 0;
  bool may_be_repeated = false;  ///< another attempt may end better
};

/// Whether the same program would fail with `code` again, whatever happens to the machine.
bool fails_again(int code) {
  for (const ExitCode lasting : {ExitCode::kUsage, ExitCode::kNoInput, ExitCode::kPermission, ExitCode::kConfig})
    if (code == static_cast<int>(lasting)) return true;
  return false;
}

absl::StatusOr<Attempt> run_once(const LaunchOptions& options, const JobSettings& job, Guard& guard,
                                 const SignalScope& signals) {
  Supervisor supervisor(options, job, guard, signals.fd(), signals.old_mask());
  TESSERA_RETURN_IF_ERROR(supervisor.start_all());
  const auto records = supervisor.wait_all();
  if (const RankRecord* cause = first_cause(records)) {
    write_all(options.stderr_fd, failure_report(records, *cause));
    const int code = cause->exit.code();
    return Attempt{code, supervisor.signals_taken() == 0 && !fails_again(code)};
  }
  // Nobody failed by itself, but a third signal may have ended some.
  for (const RankRecord& record : records)
    if (record.exit.failed()) return Attempt{record.exit.code()};
  if (const int error = supervisor.output_error(); error != 0)
    return make_error(ExitCode::kIo, "launch: all ranks ended with success, but some of what they printed is lost: " +
                                         errno_text(error) +
                                         ". [T0600] hint: send it where there is room, and nobody closes it");
  return Attempt{};
}

absl::StatusOr<int> run(const LaunchOptions& options) {
  TESSERA_RETURN_IF_ERROR(check(options));
  fill_standard_descriptors();
  TESSERA_ASSIGN_OR_RETURN(HeldPort port, HeldPort::take(options.port));
  JobSettings job;
  job.port = port.number();
  TESSERA_ASSIGN_OR_RETURN(const ErrorDirectory directory, ErrorDirectory::make());
  job.error_directory = directory.path();
  job.run_id = fmt::format("{}-{}", ::getpid(), job.port);
  job.omp_threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / options.ranks);

  const SignalScope signals;
  const std::vector<std::string> files = error_files(job, options.ranks);
  TESSERA_ASSIGN_OR_RETURN(Guard guard, Guard::start(directory.path(), files));
  while (true) {
    TESSERA_ASSIGN_OR_RETURN(const Attempt attempt, run_once(options, job, guard, signals));
    if (!attempt.may_be_repeated || job.restarts == options.max_restarts) return attempt.code;
    ++job.restarts;
    if (options.port == 0) {  // late ranks of the attempt before must not meet those of this one
      TESSERA_ASSIGN_OR_RETURN(port, HeldPort::take(0));
      job.port = port.number();
    }
    for (const std::string& file : files) ::unlink(file.c_str());  // removes the last words of ranks that are gone
    write_all(options.stderr_fd, fmt::format("tessera launch: restart {} of {}: all {} ranks begin anew\n",
                                             job.restarts, options.max_restarts, options.ranks));
  }
}

}  // namespace

int launch(const LaunchOptions& options) {
  take_process_limits();  // ranks inherit the limit of descriptors
  const auto code = run(options);
  if (code.ok()) return *code;
  write_all(options.stderr_fd, message_of(code.status()) + "\n");
  return static_cast<int>(exit_code_of(code.status()));
}

}  // namespace tessera
