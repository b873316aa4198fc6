#include "workshop/launch/launcher.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <system_error>
#include <thread>

#include "runtime/base/errno_hint.h"
#include "runtime/base/process/process_limits.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "workshop/launch/host_job.h"
#include "workshop/launch/hosts/job_address.h"
#include "workshop/launch/job_secret.h"
#include "workshop/launch/process_scope.h"
#include "workshop/launch/supervisor.h"

namespace tessera {

// This file checks the options, reserves ports, and makes attempts.
//
// `run` reserves the port of the rendezvous and those of parameter servers: a HeldPort binds the port and does not
// listen. `run` also makes the folder of the ranks' error files, and starts the Guard. An attempt is one Supervisor
// (`run_once`). If an attempt failed and another may succeed, all ranks begin anew, as often as max_restarts says, and
// at another port unless the user named one.

namespace {

bool is_elastic(const LaunchOptions& options) { return options.workers.most > 0; }

absl::Status refuse(const std::string& what) { return make_error(ExitCode::kUsage, "launch: " + what); }

absl::Status check_hosts(const LaunchOptions& options) {
  const std::vector<HostSlots>& hosts = options.hosts;
  if (hosts.empty()) return absl::OkStatus();
  if (!options.pretended_hosts.empty())
    return refuse("hosts over ssh cannot be pretended ones too. [T0855] hint: give --hosts or --pretend-hosts");
  const int all =
      std::accumulate(hosts.begin(), hosts.end(), 0, [](int sum, const HostSlots& host) { return sum + host.slots; });
  if (all != options.ranks)
    return refuse(
        fmt::format("hosts have {} slots for {} ranks. [T0857] hint: their slots say how many ranks there are", all,
                    options.ranks));
  if (options.over_ssh.command.empty() || options.over_ssh.command.front().empty())
    return refuse("no program to reach other hosts with. [T0858] hint: --ssh names it, as in --ssh \"ssh -p 2222\"");
  TESSERA_RETURN_IF_ERROR(travelling_environment(current_environment(), options.over_ssh.environment).status());
  return check_first_host(hosts.front());
}

absl::Status check_servers(const LaunchOptions& options) {
  if (options.servers < 0 || options.servers > kMostLaunchedServers)
    return refuse(
        fmt::format("the number of parameter servers must be 0 to {}, got {}. [T0991] hint: --servers says how many",
                    kMostLaunchedServers, options.servers));
  if (options.servers == 0 &&
      (!options.servers_state.empty() || options.servers_lose >= 0 || !options.servers_offload.empty()))
    return refuse(
        "there are no parameter servers whose shards could be kept. [T1039] hint: give --servers a number, or leave "
        "--servers-state, --servers-lose and --servers-offload out");
  if (options.servers_state.empty() && options.servers_lose >= 0)
    return refuse(
        "parameter servers keep their shards nowhere. [T1040] hint: give --servers-state a folder, or leave "
        "--servers-lose out");
  if (options.servers > 0 && options.max_restarts > 0 && !is_elastic(options))
    return refuse(
        "parameter servers keep shards in memory, so a restart would begin with other values. [T0992] hint: leave "
        "--max-restarts or --servers out");
  return absl::OkStatus();
}

absl::Status check_workers(const LaunchOptions& options) {
  const auto [least, most] = options.workers;
  if (!is_elastic(options)) {
    if (options.join.empty() && options.secret_file.empty()) return absl::OkStatus();
    return refuse(
        "servers are joined, and have a secret in a file, where workers come and go. [T1042] hint: --workers 1:8 says "
        "how many workers there are");
  }
  if (least < 1 || least > most || most != options.ranks)
    return refuse(fmt::format(
        "{} to {} workers make no sense. [T1043] hint: --workers 1:8 starts 8, and goes on with 1", least, most));
  if (!options.hosts.empty() || !options.pretended_hosts.empty())
    return refuse(
        "workers that come and go start on this machine. [T1044] hint: on each other host run tessera launch --join");
  if ((options.servers == 0) == options.join.empty())
    return refuse(
        "workers that come and go need servers: of their own, or those of a job that they join. [T1045] hint: give "
        "--servers, or --join with the addresses that the job's first launcher has printed");
  const char* const secret = ::getenv("TESSERA_SERVERS_SECRET");
  if (!options.join.empty() && options.secret_file.empty() && (secret == nullptr || *secret == '\0'))
    return refuse(
        "who joins a job has to know its secret. [T1046] hint: start the job with --secret FILE and give a copy of "
        "that file here, or set TESSERA_SERVERS_SECRET on both sides");
  return absl::OkStatus();
}

absl::Status check(const LaunchOptions& options) {
  if (options.command.empty() || options.command.front().empty())
    return refuse(
        "no program given. [T0591] hint: name it behind \"--\", as in tessera launch -n 4 -- ./train strategy.json");
  if (options.ranks < 1 || (options.hosts.empty() && options.ranks > kMostSlots))
    return refuse(fmt::format("the number of ranks must be 1 to {}, got {}. [T0592] hint: -n says how many", kMostSlots,
                              options.ranks));
  const std::vector<int>& pretended = options.pretended_hosts;
  const bool are_hosts = std::ranges::all_of(pretended, [](int ranks) { return ranks > 0; });
  const auto all = std::accumulate(pretended.begin(), pretended.end(), std::int64_t{0});
  if (!pretended.empty() && (!are_hosts || all != options.ranks))
    return refuse(fmt::format(
        "{} pretended hosts with {} ranks in all cannot hold {} ranks. [T0990] hint: give -n the sum of the numbers "
        "of --pretend-hosts, each of them above 0",
        pretended.size(), all, options.ranks));
  if (options.port < 0 || options.port > 65535)
    return refuse(
        fmt::format("port {} is outside of 0 to 65535. [T0594] hint: --port 0 takes a free one", options.port));
  if (options.max_restarts < 0)
    return refuse(fmt::format("{} restarts make no sense. [T0595] hint: --max-restarts 0 starts ranks once",
                              options.max_restarts));
  for (const double time : {options.times.grace_s, options.times.term_s})
    if (!(time >= 0 && time <= 1e6))
      return refuse(
          fmt::format("a time of {} s makes no sense. [T0596] hint: give --grace from 0 to a million seconds", time));
  TESSERA_RETURN_IF_ERROR(check_servers(options));
  TESSERA_RETURN_IF_ERROR(check_workers(options));
  return check_hosts(options);
}

/// A port that is reserved for this job while the object exists. The port is bound here, but nobody listens. The system
/// therefore gives it to no other program, while rank 0 may bind it and listen: the launcher and rank 0 both set
/// SO_REUSEADDR, as c10d does.
class HeldPort {
 public:
  /// Takes `port` of the loopback interface, or of all interfaces if there are several hosts. 0 takes any free port.
  static absl::StatusOr<HeldPort> take(int port, bool several_hosts) {
    HeldPort held;
    held.socket_ = OwnedFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int fd = held.socket_.get();
    if (!held.socket_.is_open()) return make_error(ExitCode::kOsResource, "launch: no socket: " + reason_of(errno));
    const int on = 1;  // connections of an ended job do not count as a port in use
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(several_hosts ? INADDR_ANY : INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    socklen_t length = sizeof address;
    const auto raw = reinterpret_cast<sockaddr*>(&address);
    if (::bind(fd, raw, length) != 0)
      return make_error(
          ExitCode::kUnavailable,
          fmt::format("launch: cannot use port {} of {}: {}. [T0597] hint: give another --port, or 0 for a free one",
                      port, several_hosts ? "this machine" : "127.0.0.1", std::generic_category().message(errno)));
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

/// The ports of a job's parameter servers.
struct HeldServers {
  std::vector<HeldPort> ports;
  std::vector<std::string> addresses;
};

/// Takes a port for each parameter server. Writes the servers and the secret into this process's environment, which all
/// ranks inherit, also those on other hosts (host_job.h).
absl::StatusOr<HeldServers> hold_servers(const LaunchOptions& options, const JobSettings& job, bool several_hosts) {
  HeldServers held;
  if (!options.join.empty()) {
    TESSERA_ASSIGN_OR_RETURN(const std::string known, job_secret(options.secret_file, /*makes_file=*/false));
    ::setenv("TESSERA_SERVERS", options.join.c_str(), 1);
    ::setenv("TESSERA_SERVERS_SECRET", known.c_str(), 1);
  }
  if (options.servers == 0) return held;
  std::string all;
  for (int i = 0; i < options.servers; ++i) {
    TESSERA_ASSIGN_OR_RETURN(HeldPort port, HeldPort::take(0, several_hosts));
    const bool is_ipv6 = job.address.find(':') != std::string::npos;
    held.addresses.push_back(fmt::format("{}:{}", is_ipv6 ? "[" + job.address + "]" : job.address, port.number()));
    held.ports.push_back(std::move(port));
    all += (i == 0 ? "" : ",") + held.addresses.back();
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string secret, is_elastic(options)
                                                         ? job_secret(options.secret_file, /*makes_file=*/true)
                                                         : random_secret());
  if (is_elastic(options))
    write_all(options.stderr_fd, fmt::format("tessera launch: workers join by --join {}\n", all));
  ::setenv("TESSERA_SERVERS", all.c_str(), 1);
  ::setenv("TESSERA_SERVERS_SECRET", secret.c_str(), 1);
  return held;
}

/// Returns whether a job with parameter servers has trained: some rank ended with success, and no server failed. The
/// result is false for other jobs.
bool has_trained(const LaunchOptions& options, const std::vector<RankRecord>& records) {
  if (options.servers == 0 && !is_elastic(options)) return false;
  const auto workers = static_cast<std::ptrdiff_t>(options.ranks);
  return std::any_of(records.begin(), records.begin() + workers,
                     [](const RankRecord& record) { return !record.exit.failed(); }) &&
         std::none_of(records.begin() + workers, records.end(),
                      [](const RankRecord& record) { return record.failed(); });
}

/// One run of all ranks, from their start until all have ended.
struct Attempt {
  int code = 0;
  bool may_be_repeated = false;  ///< whether another attempt may succeed
};

absl::StatusOr<Attempt> run_once(const LaunchOptions& options, const JobSettings& job,
                                 const std::vector<std::string>& servers, Guard& guard, const SignalScope& signals) {
  Supervisor supervisor(options, job, guard, signals.fd(), signals.old_mask());
  supervisor.serve_at(servers);
  TESSERA_RETURN_IF_ERROR(supervisor.start_all());
  if (const auto signal = supervisor.interrupted_by()) return Attempt{128 + *signal};
  const auto records = supervisor.wait_all();
  const bool is_good = supervisor.signals_taken() == 0 && !supervisor.lacks_results() && has_trained(options, records);
  if (const RankRecord* cause = is_good ? nullptr : first_cause(records)) {
    write_all(options.stderr_fd, failure_report(records, *cause));
    const int code = cause->exit.code();
    return Attempt{code, supervisor.signals_taken() == 0 && !fails_again(code) && !is_elastic(options)};
  }
  // No rank failed on its own, but a third signal may have ended some ranks.
  for (const RankRecord& record : records)
    if (!is_good && record.rank < options.ranks && record.exit.failed()) return Attempt{record.exit.code()};
  if (const int error = supervisor.output_error(); error != 0)
    return make_error(ExitCode::kIo, "launch: all ranks ended with success, but some of what they printed is lost: " +
                                         errno_text(error) +
                                         ". [T0600] hint: send it where there is room, and nobody closes it");
  return Attempt{};
}

absl::StatusOr<int> run(const LaunchOptions& options) {
  TESSERA_RETURN_IF_ERROR(check(options));
  const bool several_hosts = options.hosts.size() > 1;
  TESSERA_ASSIGN_OR_RETURN(HeldPort port, HeldPort::take(options.port, several_hosts));
  JobSettings job;
  job.port = port.number();
  if (!options.over_ssh.address.empty()) {
    job.address = options.over_ssh.address;
  } else if (several_hosts) {
    TESSERA_ASSIGN_OR_RETURN(job.address, job_address(options.hosts));
  }
  const bool others_come = several_hosts || !options.over_ssh.address.empty();
  TESSERA_ASSIGN_OR_RETURN(const HeldServers servers, hold_servers(options, job, others_come));
  TESSERA_ASSIGN_OR_RETURN(const ErrorDirectory directory, ErrorDirectory::make());
  job.error_directory = directory.path();
  job.run_id = fmt::format("{}-{}", ::getpid(), job.port);
  const int here = several_hosts ? options.hosts.front().slots : options.ranks;
  job.omp_threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / here);

  const SignalScope signals;
  std::vector<std::string> files = error_files(job, 0, here);
  for (int i = 0; i < options.workers.most; ++i) files.push_back(job.results_file(i));
  TESSERA_ASSIGN_OR_RETURN(Guard guard, Guard::start(directory.path(), files));
  while (true) {
    TESSERA_ASSIGN_OR_RETURN(const Attempt attempt, run_once(options, job, servers.addresses, guard, signals));
    if (!attempt.may_be_repeated || job.restarts == options.max_restarts) return attempt.code;
    ++job.restarts;
    if (options.port == 0) {  // late ranks of the last attempt must not meet ranks of this attempt
      TESSERA_ASSIGN_OR_RETURN(port, HeldPort::take(0, several_hosts));
      job.port = port.number();
    }
    for (const std::string& file : files) ::unlink(file.c_str());  // this removes error files of earlier ranks
    write_all(options.stderr_fd, fmt::format("tessera launch: restart {} of {}: all {} ranks begin anew\n",
                                             job.restarts, options.max_restarts, options.ranks));
  }
}

}  // namespace

std::string tessera_of(const LaunchOptions& options) {
  std::error_code ignored;
  return options.tessera.empty() ? std::filesystem::read_symlink("/proc/self/exe", ignored).string() : options.tessera;
}

std::vector<int> ranks_of_hosts(const LaunchOptions& options) {
  std::vector<int> ranks = options.pretended_hosts;
  for (const HostSlots& host : options.hosts) ranks.push_back(host.slots);
  return ranks.empty() ? std::vector<int>{options.ranks} : ranks;
}

int launch(const LaunchOptions& options) {
  take_process_limits();  // ranks inherit the raised limit of descriptors; no pipe gets a standard descriptor's number
  const auto code = run(options);
  if (code.ok()) return *code;
  write_all(options.stderr_fd, message_of(code.status()) + "\n");
  return static_cast<int>(exit_code_of(code.status()));
}

}  // namespace tessera
