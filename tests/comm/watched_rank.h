#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "runtime/comm/key_value_store.h"
#include "tests/support/limits/patience.h"

// The port at which other ranks watch a rank (runtime/comm/next_rank.h).

namespace tessera {

/// Returns the local port of a TCP connection over IPv4, or the port of its other end. Returns 0 for anything else.
inline int port_of(int fd, bool of_other_end) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  if ((of_other_end ? getpeername(fd, raw, &length) : getsockname(fd, raw, &length)) != 0) return 0;
  return address.sin_family == AF_INET ? ntohs(address.sin_port) : 0;
}

inline constexpr int kDescriptors = 4096;  // more than a rank of these tests opens

/// Returns the port at which other ranks watch `rank`.
inline int port_of_watch(KeyValueStore& store, int rank) {
  const std::string place = store.get("listens/" + std::to_string(rank), std::chrono::seconds(20)).value_or("");
  if (place.empty()) throw std::runtime_error("this rank cannot be watched");
  return std::atoi(place.c_str() + place.find(' ') + 1);
}

/// Waits until the rank before this one watches this process, at `port`.
inline void wait_until_watched(int port) {
  for (Deadline limit(std::chrono::seconds(20)); !limit.passed();
       std::this_thread::sleep_for(std::chrono::milliseconds(50)))
    for (int fd = 0; fd < kDescriptors; ++fd)
      if (port_of(fd, false) == port && port_of(fd, true) != 0) return;
  throw std::runtime_error("nobody watches this rank");
}

}  // namespace tessera
