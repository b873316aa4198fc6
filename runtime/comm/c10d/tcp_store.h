#pragma once

#include <absl/status/statusor.h>

#include <memory>
#include <string>

#include "runtime/comm/c10d/c10d_store.h"
#include "tessera/topology.h"

namespace tessera {

/// Joins the job's store (c10d::TCPStore at master_addr:master_port) and returns once all ranks have joined it.
///
/// Rank 0 serves the store, unless torchrun's agent serves it (`topology.agent_store`). The server listens only on
/// loopback if `master_addr` is a loopback address, and otherwise on all interfaces. Keys are prefixed with the run's
/// id and restart count, so this start never reads keys of another job or of an earlier start.
///
/// `transport` is the name of the transport that carries this rank's collectives. Ranks with different transports would
/// wait for each other in vain, so this function returns an error to them.
///
/// `master_addr` may be a name that is not known yet (a host that is starting), an IPv4 or an IPv6 address.
///
/// Errors: 69 if the port is in use, or the store is another job's store; 75 if a name is not known, if a store does
/// not answer, or if ranks do not join within `init_timeout_s` (the message has their numbers, if the store answers);
/// 78 if two processes claim one rank, or if ranks have different transports or different lists of hosts
/// (Topology::ranks_of_hosts); 71 if a limit of this process is reached.
absl::StatusOr<std::shared_ptr<C10dStore>> tcp_store(const Topology& topology, double init_timeout_s,
                                                     const std::string& transport = "");

/// Returns true for "localhost", "::1" and 127.0.0.0/8.
bool is_loopback(const std::string& address);

}  // namespace tessera
