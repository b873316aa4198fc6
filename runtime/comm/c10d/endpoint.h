#pragma once

#include <absl/status/statusor.h>
#include <sys/socket.h>

#include <chrono>
#include <string>

namespace tessera {

/// Where a host can be reached, looked up by ourselves: c10d's own look-up waits as long as the resolver likes, and
/// prints a stack for every attempt.

struct HostAddress {
  sockaddr_storage address{};
  socklen_t length = 0;
  std::string text;  ///< numeric: "10.0.0.1", "::1"

  bool is_ipv6() const { return address.ss_family == AF_INET6; }
};

/// Looks `host` up until it is known, or `deadline`: names of hosts that are starting appear late. Prefers IPv4.
/// 75 if it is not known by then, with the resolver's reason.
absl::StatusOr<HostAddress> resolve_in_time(const std::string& host, std::chrono::steady_clock::time_point deadline);

/// Waits until something listens at `port` of `host`, or `deadline`. 75 with the last reason. Nothing is sent.
absl::Status wait_for_listener(const HostAddress& host, int port, std::chrono::steady_clock::time_point deadline);

}  // namespace tessera
