#include "runtime/comm/c10d/tcp_store.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "runtime/base/errno_hint.h"
#include "runtime/base/log.h"
#include "runtime/base/process/process_limits.h"
#include "runtime/base/rank_name.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/comm/c10d/endpoint.h"
#include "runtime/comm/c10d/strangers.h"
#include "runtime/comm/in_time.h"
#include "runtime/comm/meet_in_store.h"

// Joins the job's store in three stages, on a separate thread, because c10d may wait for ever. In the first stage, a
// rank looks up the store's address and waits until a process listens there (rank 0 opens the listening socket). Then
// it connects, and in the last stage it calls the roll. The roll call checks that each rank is claimed only once, and
// waits until all ranks have joined. If a stage does not end in time, the error tells what this rank waited for. The
// error of the roll call names the missing ranks.

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostAskedFor = 1024;  // largest number of ranks that an error looks up one by one
/// Time that a rank has after the limit to find out which ranks are missing. Within this time, the rank that serves the
/// store also waits for the other ranks to find it out (RollCall).
constexpr std::chrono::milliseconds kTimeToReport{2500};

/// The stage of a rank that joins the store. The error names the stage in which the rank waits.
enum class Stage { kFind, kConnect, kMeet };

std::string endpoint(const Topology& topology) {
  return topology.master_addr + ":" + std::to_string(topology.master_port);
}

std::string self(const Topology& topology) { return rank_name(topology.rank, topology.world_size); }

absl::Status port_error(const Topology& topology, int error) {
  if (!limit_hint(error).empty())
    return make_error(exit_code_of_errno(error), self(topology) + ": cannot serve the store on port " +
                                                     std::to_string(topology.master_port) + ": " + reason_of(error));
  return make_error(
      ExitCode::kUnavailable,
      self(topology) + ": cannot serve the store on port " + std::to_string(topology.master_port) + ": " +
          std::strerror(error) +
          (error == EADDRINUSE ? ". [T0440] hint: another job or a process that has not ended yet uses it; choose "
                                 "another MASTER_PORT, or let the launcher choose one"
                               : ". [T0441] hint: choose another MASTER_PORT"));
}

// Returns a listening socket. It is bound here because c10d always listens on all interfaces. A socket of IPv6 on all
// interfaces takes IPv4 too.
absl::StatusOr<int> bound_socket(const Topology& topology, bool ipv6, bool loopback_only) {
  const int fd = socket(ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return port_error(topology, errno);
  const int yes = 1, no = 0;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_storage address{};
  socklen_t length = sizeof(sockaddr_in);
  const in_port_t port = htons(static_cast<std::uint16_t>(topology.master_port));
  if (ipv6) {
    auto& six = reinterpret_cast<sockaddr_in6&>(address);
    six.sin6_family = AF_INET6;
    six.sin6_port = port;
    six.sin6_addr = loopback_only ? in6addr_loopback : in6addr_any;
    length = sizeof six;
    setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
  } else {
    auto& four = reinterpret_cast<sockaddr_in&>(address);
    four.sin_family = AF_INET;
    four.sin_port = port;
    four.sin_addr.s_addr = htonl(loopback_only ? INADDR_LOOPBACK : INADDR_ANY);
  }
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(fd, SOMAXCONN) == 0) return fd;
  const int error = errno;
  close(fd);
  return port_error(topology, error);
}

absl::Status no_store(const Topology& topology, double init_timeout_s, const std::string& why_and_hint) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", init_timeout_s);
  return make_error(ExitCode::kPeerLost, self(topology) + ": no store at " + endpoint(topology) + " within " + seconds +
                                             " s: " + why_and_hint);
}

absl::StatusOr<c10::intrusive_ptr<c10d::Store>> connect(const Topology& topology, double init_timeout_s,
                                                        Clock::time_point deadline, std::atomic<Stage>& stage) {
  const auto known = resolve_in_time(topology.master_addr, deadline);
  if (!known.ok()) return make_error(exit_code_of(known.status()), self(topology) + ": " + message_of(known.status()));
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(topology.master_port);
  options.isServer = topology.rank == 0 && !topology.agent_store;
  options.waitWorkers = false;
  if (options.isServer) {
    // No other host can reach this host by a loopback address.
    const bool loopback_only = is_loopback(topology.master_addr);
    TESSERA_ASSIGN_OR_RETURN(const int fd, bound_socket(topology, known->is_ipv6(), loopback_only));
    watch_for_strangers(fd);
    options.masterListenFd = fd;
  } else if (const absl::Status there = wait_for_listener(*known, topology.master_port, deadline); !there.ok()) {
    return no_store(topology, init_timeout_s, message_of(there));
  }
  stage = Stage::kConnect;
  // Connecting gets at least one second, even if the listener appeared just before the deadline.
  options.timeout = std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()),
                             std::chrono::milliseconds(1000));
  try {
    c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::TCPStore>(known->text, options);
    store->setTimeout(std::chrono::milliseconds(static_cast<std::int64_t>(init_timeout_s * 1000)));
    keep_from_idling(topology.master_port);
    return store;
  } catch (const std::exception& error) {
    const std::string text = text_of_c10_exception(error);
    if (const int limit = limit_in(text))
      return make_error(exit_code_of_errno(limit),
                        self(topology) + ": cannot join the store at " + endpoint(topology) + ": " + reason_of(limit));
    return no_store(topology, init_timeout_s,
                    text + ". [T0442] hint: is another program's server at that port? Choose another MASTER_PORT");
  }
}

/// Returns a text with the number of ranks on each host, according to this rank's topology.
std::string hosts_of(const Topology& topology) {
  if (topology.has_equal_hosts()) return std::to_string(topology.local_world_size) + " on each host";
  return joined_numbers(topology.ranks_of_hosts, ",");
}

/// Checks that all ranks of this job have joined the store, each once, and that no other process has joined it. It also
/// checks that all ranks have the same transport and the same numbers of ranks on hosts. Ranks that differ would make
/// different groups, and wait for each other in vain.
class RollCall {
 public:
  RollCall(const Topology& topology, KeyValueStore& store, Clock::time_point deadline, std::string transport)
      : topology_(topology), store_(store), deadline_(deadline), transport_(std::move(transport)) {}

  absl::Status run() {
    TESSERA_ASSIGN_OR_RETURN(const auto claims, store_.add(key(topology_.rank), 1));
    if (claims > 1)
      return make_error(
          ExitCode::kConfig,
          self(topology_) + ": RANK " + std::to_string(topology_.rank) +
              " is claimed by another process too (launcher: " + topology_.launcher +
              "). [T0443] hint: give each process a RANK of its own, or each job a MASTER_PORT of its own");
    TESSERA_RETURN_IF_ERROR(store_.add(key_of_hosts(), 1).status());
    TESSERA_RETURN_IF_ERROR(store_.add(key_of_transport(), 1).status());
    TESSERA_RETURN_IF_ERROR(publish_process(store_, topology_.rank));
    TESSERA_RETURN_IF_ERROR(store_.add("present", 1).status());
    for (;; std::this_thread::sleep_for(std::chrono::milliseconds(2))) {
      TESSERA_ASSIGN_OR_RETURN(const auto present, store_.add("present", 0));
      if (present >= topology_.world_size) return check_same();
      if (Clock::now() >= deadline_) return missing_error(present);
    }
  }

 private:
  static std::string key(int rank) { return "present/" + std::to_string(rank); }
  std::string key_of_hosts() const { return "hosts/" + hosts_of(topology_); }
  std::string key_of_transport() const { return "transport/" + transport_; }

  /// Every rank adds 1 at the keys of its hosts and its transport before it reports its presence, so all ranks see the
  /// same counts.
  absl::Status check_same() {
    TESSERA_ASSIGN_OR_RETURN(const auto like_this, store_.add(key_of_hosts(), 0));
    TESSERA_ASSIGN_OR_RETURN(const auto over_this, store_.add(key_of_transport(), 0));
    if (like_this >= topology_.world_size && over_this >= topology_.world_size) return absl::OkStatus();
    TESSERA_RETURN_IF_ERROR(linger(topology_.world_size));
    if (over_this < topology_.world_size)
      return make_error(ExitCode::kConfig, self(topology_) + ": the transport is \"" + transport_ +
                                               "\" here (comm.transport), and another one on " +
                                               std::to_string(topology_.world_size - over_this) +
                                               " of the other ranks. [T1057] hint: start all ranks with one strategy");
    return make_error(
        ExitCode::kConfig,
        self(topology_) + " (" + topology_.launcher + ") knows hosts of these numbers of ranks: " +
            hosts_of(topology_) + "; " + std::to_string(topology_.world_size - like_this) +
            " of the others know other ones. [T0994] hint: say the ranks of each host, in their order, to all "
            "ranks, as in TESSERA_HOSTS=2,3");
  }

  absl::Status missing_error(std::int64_t present) {
    std::vector<int> missing;
    for (int rank = 0; rank < std::min(topology_.world_size, kMostAskedFor); ++rank) {
      TESSERA_ASSIGN_OR_RETURN(const bool is_present, store_.has(key(rank)));
      if (!is_present) missing.push_back(rank);
    }
    TESSERA_RETURN_IF_ERROR(linger(present));
    return make_error(ExitCode::kPeerLost,
                      self(topology_) + ": " + std::to_string(topology_.world_size - present) + " of " +
                          std::to_string(topology_.world_size) + " ranks are still missing at the store of " +
                          endpoint(topology_) + ": rank " + number_ranges(missing) +
                          (topology_.world_size > kMostAskedFor ? ", ..." : "") +
                          " (comm.init_timeout_s sets the limit). [T0444] hint: start them too, with this WORLD_SIZE, "
                          "MASTER_ADDR and MASTER_PORT, and look why their hosts did not (they have met nobody)");
  }

  // If this rank serves the store, waits up to one second so that the other ranks can read the store before the store
  // ends with this rank.
  absl::Status linger(std::int64_t present) {
    TESSERA_RETURN_IF_ERROR(store_.add("told", 1).status());
    for (const auto end = Clock::now() + std::chrono::seconds(1); topology_.rank == 0 && Clock::now() < end;) {
      TESSERA_ASSIGN_OR_RETURN(const auto told, store_.add("told", 0));
      if (told >= present) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return absl::OkStatus();
  }

  const Topology& topology_;
  KeyValueStore& store_;
  const Clock::time_point deadline_;
  const std::string transport_;
};

// Checks that the store belongs to this job. A store that rank 0 serves belongs to one job. A store that torchrun's
// agent serves may belong to several jobs in turn.
absl::Status check_owner(const Topology& topology, C10dStore& store, std::chrono::milliseconds timeout) {
  if (topology.agent_store) return absl::OkStatus();
  const std::string mine = "run '" + topology.run_id + "' of " + std::to_string(topology.world_size) + " ranks";
  if (topology.rank == 0) return store.set("tessera/owner", mine);
  TESSERA_ASSIGN_OR_RETURN(const std::string owner, store.get("tessera/owner", timeout));
  if (owner == mine) return absl::OkStatus();
  return make_error(ExitCode::kUnavailable, self(topology) + ": the store at " + endpoint(topology) + " belongs to " +
                                                owner + ", this is " + mine +
                                                ". [T0445] hint: choose another MASTER_PORT");
}

}  // namespace

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.rfind("127.", 0) == 0;
}

namespace {

absl::StatusOr<std::shared_ptr<C10dStore>> join(const Topology& topology, double init_timeout_s,
                                                const std::string& transport, Clock::time_point deadline,
                                                std::atomic<Stage>& stage) {
  const auto timeout = std::chrono::milliseconds(static_cast<std::int64_t>(init_timeout_s * 1000));
  TESSERA_ASSIGN_OR_RETURN(auto connected, connect(topology, init_timeout_s, deadline, stage));
  stage = Stage::kMeet;
  C10dStore whole(connected);
  TESSERA_RETURN_IF_ERROR(check_owner(topology, whole, timeout));
  const bool of_agent = topology.agent_store && topology.launcher != "torch.distributed";
  const std::string prefix = "tessera/" + topology.run_id + "/" + std::to_string(topology.restart_count);
  auto store = std::make_shared<C10dStore>(c10::make_intrusive<c10d::PrefixStore>(prefix, connected),
                                           of_agent ? "torchrun's agent" : "rank 0");
  TESSERA_RETURN_IF_ERROR(RollCall(topology, *store, deadline, transport).run());
  return store;
}

absl::Status silence(const Topology& topology, double init_timeout_s, Stage stage) {
  if (stage == Stage::kConnect)
    return no_store(topology, init_timeout_s,
                    "something listens there, and does not answer as a store. [T0446] hint: another program has that "
                    "port, so choose another MASTER_PORT; or rank 0 stands still");
  return no_store(topology, init_timeout_s,
                  "rank 0, which serves it, does not answer any more. [T0447] hint: see whether its process is stopped "
                  "or its host gone");
}

}  // namespace

absl::StatusOr<std::shared_ptr<C10dStore>> tcp_store(const Topology& topology, double init_timeout_s,
                                                     const std::string& transport) {
  turn_pipe_signal_into_error();
  // c10d waits without end if a listener accepts a connection and then sends nothing. A separate thread therefore joins
  // the store. If this thread does not end in time, nothing waits for it, and this process only has to report the
  // failure.
  struct Joining {
    std::atomic<Stage> stage = Stage::kFind;
    absl::StatusOr<std::shared_ptr<C10dStore>> result;
  };
  const auto joining = std::make_shared<Joining>();
  const auto limit = std::chrono::milliseconds(static_cast<std::int64_t>(init_timeout_s * 1000));
  const auto deadline = Clock::now() + limit;
  const auto body = [joining, topology, init_timeout_s, transport, deadline, log = log_rank()] {
    set_log_rank(log);
    joining->result = join(topology, init_timeout_s, transport, deadline, joining->stage);
  };
  if (ends_in_time(body, limit + kTimeToReport)) return std::move(joining->result);
  if (Clock::now() < deadline)
    return make_error(ExitCode::kOsResource,
                      self(topology) + ": cannot start a thread that joins the store: " + reason_of(EAGAIN));
  return silence(topology, init_timeout_s, joining->stage);
}

}  // namespace tessera
