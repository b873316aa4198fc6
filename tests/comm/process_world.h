#pragma once

#include <chrono>

#include "runtime/comm/c10d/endpoint.h"
#include "runtime/comm/job/process_mesh.h"
#include "tests/comm/forked_world.h"
#include "tests/support/limits/patience.h"

// The worlds of processes that tests of the store and of groups share.

namespace tessera {

inline Topology topology_of(int rank, int ranks, int hosts, int port) {
  Topology topology;
  topology.rank = rank;
  topology.world_size = ranks;
  topology.local_world_size = ranks / hosts;
  topology.local_rank = rank % topology.local_world_size;
  topology.host = rank / topology.local_world_size;
  topology.launcher = "tessera";
  topology.master_port = port;
  topology.run_id = "test";
  return topology;
}

inline CommConfig over(TransportChoice transport = TransportChoice::kAuto, double timeout_s = kNeverPassed) {
  return {.transport = transport, .timeout_s = timeout_s, .init_timeout_s = kNeverPassed};
}

/// Waits until a process listens at `port` of this host. Returns false if none does in time.
inline bool is_listened_at(int port) {
  const auto until = std::chrono::steady_clock::now() + patient(std::chrono::seconds(20));
  return wait_for_listener(*resolve_in_time("127.0.0.1", until), port, until).ok();
}

}  // namespace tessera
