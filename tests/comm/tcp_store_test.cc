// Tests the TCP store at which the ranks of a job meet: which ranks come, which are missing, which do not belong to the
// job, and how soon this is reported.

#include "runtime/comm/c10d/tcp_store.h"

#include <gmock/gmock.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "runtime/comm/job/process_mesh.h"
#include "runtime/comm/mesh_groups.h"
#include "tests/comm/collectives_properties.h"
#include "tests/comm/process_world.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/free_port.h"

namespace tessera {
namespace tcp_store_test {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

TEST(TcpStore, PortInUseNamesThePort) {
  const Listener other;
  const auto store = tcp_store(topology_of(0, 2, 1, other.port), 5);
  EXPECT_EQ(exit_code_of(store.status()), ExitCode::kUnavailable);
  EXPECT_THAT(message_of(store.status()), AllOf(HasSubstr(std::to_string(other.port)), HasSubstr("MASTER_PORT")));
}

TEST(TcpStore, MissingRanksAreListed) {
  const int port = free_port();
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    return tcp_store(topology_of(rank, 4, 1, port), 1.0).status();
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost);
    EXPECT_THAT(end.message, HasSubstr("still missing"));
    EXPECT_THAT(end.message, HasSubstr("rank 2, 3"));
  }
}

TEST(TcpStore, UnservedRankNamesTheStoresAddress) {
  const auto store = tcp_store(topology_of(1, 2, 1, free_port()), 1.0);
  EXPECT_EQ(exit_code_of(store.status()), ExitCode::kPeerLost);
  EXPECT_THAT(message_of(store.status()), HasSubstr("rank 1/2: no store at 127.0.0.1:"));
}

/// A socket that listens on the loopback interface and sends nothing to processes that connect.
class SilentListener {
 public:
  SilentListener() : fd_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    socklen_t length = sizeof address;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const auto raw = reinterpret_cast<sockaddr*>(&address);
    require(bind(fd_, raw, length) == 0 && listen(fd_, 16) == 0 && getsockname(fd_, raw, &length) == 0, "listen");
    port_ = ntohs(address.sin_port);
  }
  ~SilentListener() { close(fd_); }
  int port() const { return port_; }

 private:
  int fd_, port_ = 0;
};

TEST(TcpStore, SilentListenerIsNamedInTime) {
  const SilentListener listener;
  // The rank is a separate process. When the process ends with the rank's error, the rank's thread ends, too.
  ForkedRanks ranks(
      1, [&](int, KeyValueStore&) { return tcp_store(topology_of(1, 2, 1, listener.port()), 1.0).status(); });
  const RankEnd end = ranks.wait(0);
  EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
  EXPECT_EQ(end.signal, 0);
  EXPECT_THAT(end.message, AllOf(HasSubstr("rank 1/2: no store at 127.0.0.1:"), HasSubstr("does not answer as a store"),
                                 HasSubstr("choose another MASTER_PORT")));
}

TEST(TcpStore, StoppedRankZeroIsNamedInTime) {
  const int port = free_port();
  ForkedRanks ranks(2, [&](int rank, KeyValueStore& outside) -> absl::Status {
    if (rank == 0) return tcp_store(topology_of(0, 3, 1, port), kNeverPassed).status();
    TESSERA_RETURN_IF_ERROR(told(outside, "stopped").status());
    return tcp_store(topology_of(1, 3, 1, port), 1.0).status();
  });
  ASSERT_TRUE(is_listened_at(port));
  ranks.signal(0, SIGSTOP);
  ASSERT_TRUE(ranks.store().set("stopped", "yes").ok());
  const RankEnd end = ranks.wait(1);
  EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
  EXPECT_THAT(end.message, HasSubstr("no store at 127.0.0.1:"));
}

TEST(TcpStore, UnknownHostIsAnErrorWithinTheTimeLimit) {
  for (const int rank : {0, 1}) {
    Topology topology = topology_of(rank, 2, 1, free_port());
    topology.master_addr = "no-such-host.invalid";
    Deadline soon(4s);
    const auto store = tcp_store(topology, 1.0);
    EXPECT_FALSE(soon.passed());
    EXPECT_EQ(exit_code_of(store.status()), ExitCode::kPeerLost);
    EXPECT_THAT(message_of(store.status()), AllOf(HasSubstr("no-such-host.invalid"), HasSubstr("hint: MASTER_ADDR")));
  }
}

TEST(TcpStore, Ipv6LoopbackServesTheStore) {
  const int port = free_port();
  const double init_timeout_s = patient_s(5);  // a machine without IPv6 waits this long
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore& outside) -> absl::Status {
    Topology topology = topology_of(rank, 2, 1, port);
    topology.master_addr = "::1";
    TESSERA_ASSIGN_OR_RETURN(const auto store, tcp_store(topology, init_timeout_s));
    if (rank == 1) return outside.set("has come", "yes");
    return told(outside, "has come").status();  // this process serves the store until rank 1 has joined
  });
  // If the machine has no IPv6, rank 0 ends with kUnavailable, and rank 1 finds no store.
  const bool has_ipv6 = ends[0].exit_code != ExitCode::kUnavailable;
  for (const auto& end : ends) EXPECT_TRUE(!has_ipv6 || end.exit_code == ExitCode::kOk) << end.message;
}

TEST(TcpStore, ManyMissingRanksGiveAShortMessage) {
  const auto store = tcp_store(topology_of(0, 100'000, 1, free_port()), 0.5);
  EXPECT_EQ(exit_code_of(store.status()), ExitCode::kPeerLost);
  EXPECT_THAT(message_of(store.status()), HasSubstr("99999 of 100000 ranks are still missing"));
  EXPECT_LT(message_of(store.status()).size(), 500u);
}

TEST(TcpStore, RankClaimedTwiceIsRefused) {
  const int port = free_port();
  const double init_timeout_s = patient_s(1);
  const auto ends = fork_ranks(3, [&](int process, KeyValueStore&) -> absl::Status {
    return tcp_store(topology_of(process == 0 ? 0 : 1, 4, 1, port), init_timeout_s).status();
  });
  EXPECT_TRUE((ends[1].exit_code == ExitCode::kConfig) != (ends[2].exit_code == ExitCode::kConfig));
  EXPECT_THAT(ends[1].message + ends[2].message, HasSubstr("RANK 1 is claimed by another process"));
}

/// Open MPI tells each rank only the number of ranks on its own host. Each rank then assumes that every host has as
/// many ranks.
TEST(TcpStore, RanksThatKnowOtherHostsAreRefused) {
  const int port = free_port();
  const auto ends = fork_ranks(4, [&](int rank, KeyValueStore&) -> absl::Status {
    return tcp_store(topology_of(rank, 4, rank < 2 ? 2 : 4, port), kNeverPassed).status();
  });
  for (const auto& end : ends) {
    EXPECT_EQ(end.exit_code, ExitCode::kConfig);
    EXPECT_THAT(end.message, AllOf(HasSubstr("on each host; 2 of the others"), HasSubstr("TESSERA_HOSTS=2,3")));
  }
}

// A firewall between hosts forgets a connection that carries no data.
TEST(TcpStore, IdleConnectionsGetSignsOfLife) {
  const int port = free_port();
  expect_all_ok(fork_ranks(2, [&](int rank, KeyValueStore& outside) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const auto store, tcp_store(topology_of(rank, 2, 1, port), kNeverPassed));
    if (rank == 0) return told(outside, "looked").status();  // rank 0 serves the store
    const auto another = store->connected_anew();
    int connections = 0;
    for (int fd = 0; fd < 1024; ++fd) {
      sockaddr_in6 there{};  // the port of an IPv4 address is at the same place
      socklen_t length = sizeof there, size = sizeof(int);
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&there), &length) != 0) continue;
      if ((there.sin6_family != AF_INET && there.sin6_family != AF_INET6) || ntohs(there.sin6_port) != port) continue;
      int is_alive = 0;
      require(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &is_alive, &size) == 0 && is_alive != 0, "signs of life");
      ++connections;
    }
    require(another && connections >= 2, "both connections were seen");
    return outside.set("looked", "yes");
  }));
}

TEST(TcpStore, RanksWithOtherTransportsAreRefused) {
  const int port = free_port();
  const auto ends = fork_ranks(3, [&](int rank, KeyValueStore&) -> absl::Status {
    const TransportChoice choice = rank == 1 ? TransportChoice::kHost : TransportChoice::kGloo;
    return make_process_mesh(topology_of(rank, 3, 1, port), over(choice)).status();
  });
  for (int rank = 0; rank < 3; ++rank) {
    const RankEnd& end = ends[static_cast<std::size_t>(rank)];
    EXPECT_EQ(end.exit_code, ExitCode::kConfig) << end.message;
    EXPECT_THAT(end.message,
                HasSubstr(rank == 1 ? "the transport is \"host\" here (comm.transport), and another one on 2"
                                    : "the transport is \"gloo\" here (comm.transport), and another one on 1"));
  }
}

TEST(TcpStore, AnotherJobsStoreIsRefused) {
  const int port = free_port();
  const double init_timeout_s = patient_s(1);
  const auto ends = fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    Topology topology = topology_of(rank, 2, 1, port);
    if (rank == 1) topology.run_id = "another";
    return tcp_store(topology, init_timeout_s).status();
  });
  EXPECT_EQ(ends[1].exit_code, ExitCode::kUnavailable);
  EXPECT_THAT(ends[1].message, AllOf(HasSubstr("belongs to run 'test'"), HasSubstr("this is run 'another'")));
}

/// Returns whether a socket listens on an IPv4 address. The address has the form of /proc/net/tcp, such as
/// "0100007F:7468".
bool listens_on(const std::string& address_and_port) {
  std::ifstream table("/proc/net/tcp");
  for (std::string line; std::getline(table, line);)
    if (line.find(" " + address_and_port + " 00000000:0000 0A") != std::string::npos) return true;
  return false;
}

TEST(TcpStore, OneHostsStoreListensOnLoopbackAndSurvivesGarbage) {
  const int port = free_port();
  expect_all_ok(fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(auto store, tcp_store(topology_of(rank, 2, 1, port), kNeverPassed));
    if (rank == 1) {
      std::ostringstream hex;
      hex << std::hex << std::uppercase << port;
      require(listens_on("0100007F:" + hex.str()), "listens on 127.0.0.1");
      require(!listens_on("00000000:" + hex.str()), "does not listen on every address");
      for (int i = 0; i < 200; ++i) {
        const int fd = socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        address.sin_port = htons(static_cast<std::uint16_t>(port));
        require(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0, "connect");
        const Bytes garbage = random_values(DType::kBF16, 100, i);
        (void)!send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL);
        close(fd);
      }
      TESSERA_RETURN_IF_ERROR(store->set("after", "garbage"));
    }
    TESSERA_ASSIGN_OR_RETURN(const std::string value, store->get("after", std::chrono::hours(1)));
    require(value == "garbage", "value");
    TESSERA_RETURN_IF_ERROR(store->add("done", 1).status());
    while (rank == 0 && *store->add("done", 0) < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return absl::OkStatus();
  }));
}

TEST(TcpStore, TorchrunAgentsStoreServesARestartedJob) {
  const int port = free_port();
  expect_all_ok(fork_ranks(3, [&](int process, KeyValueStore& outside) -> absl::Status {
    if (process == 2) {  // this process stands for torchrun's agent
      c10d::TCPStoreOptions options;
      options.port = static_cast<std::uint16_t>(port);
      options.isServer = true;
      options.waitWorkers = false;
      const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      for (int rank = 0; rank < 2; ++rank)
        TESSERA_RETURN_IF_ERROR(told(outside, "end/" + std::to_string(rank)).status());
      return absl::OkStatus();
    }
    for (int life = 0; life < 2; ++life) {
      Topology topology = topology_of(process, 2, 1, port);
      topology.agent_store = true;
      topology.restart_count = life;
      TESSERA_ASSIGN_OR_RETURN(const Mesh mesh, make_process_mesh(topology, over()));
      TESSERA_ASSIGN_OR_RETURN(const MeshAxes axes, groups_of(mesh).axes(1, 2));
      TESSERA_RETURN_IF_ERROR(axes.world->barrier("alive").wait());
    }
    return absl::OkStatus();
  }));
}

// Fault F4 (docs/faults.md): between the roll call and the first collective, ranks communicate only through the store.
TEST(TcpStore, StoreThatGoesAwayIsALostPeer) {
  const int port = free_port();
  ForkedRanks ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(const auto store, tcp_store(topology_of(rank, 2, 1, port), kNeverPassed));
    if (rank == 0) ::raise(SIGKILL);
    return store->get("never", std::chrono::hours(1)).status();
  });
  const RankEnd end = ranks.wait(1);
  EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
  EXPECT_THAT(end.message, HasSubstr("'never'"));
  EXPECT_THAT(end.message, HasSubstr("rank 0 is gone, which serves the store"));
}

}  // namespace tcp_store_test
}  // namespace tessera
