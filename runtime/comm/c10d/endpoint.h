#pragma once

#include <absl/status/statusor.h>

#include <chrono>
#include <string>

#include "runtime/comm/socket_address.h"

namespace tessera {

/// Looks up the address of a host. c10d's own look-up waits as long as the resolver takes, and prints a stack trace for
/// every attempt. Tessera therefore does the look-up itself.

/// One numeric address of a host.
struct HostAddress : SocketAddress {
  std::string text;  ///< numeric address: "10.0.0.1", "::1"
};

/// Looks `host` up again and again until it is known, or until `deadline`, since names of hosts that are starting
/// appear late. It prefers IPv4. Error: 75 with the resolver's reason if the name is not known by the deadline.
absl::StatusOr<HostAddress> resolve_in_time(const std::string& host, std::chrono::steady_clock::time_point deadline);

/// Waits until something listens at `port` of `host`, or until `deadline`. Nothing is sent. Error: 75 with the last
/// reason.
absl::Status wait_for_listener(const HostAddress& host, int port, std::chrono::steady_clock::time_point deadline);

}  // namespace tessera
