#pragma once

#include <sys/socket.h>

#include <chrono>
#include <string>

namespace tessera {

/// An address of IPv4 or IPv6 with a port, in the form in which the system takes it. `length` is 0 if there is no
/// address.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool is_ipv6() const { return storage.ss_family == AF_INET6; }
  int port() const;
  /// Returns the address with another port.
  SocketAddress with_port(int port) const;
};

/// Returns the address for a numeric text: "10.0.0.1", "::1". Its `length` is 0 if the text is not a numeric address.
SocketAddress numeric_address(const std::string& text, int port);

/// Returns the time that is left until `deadline`, at least 0.
std::chrono::milliseconds left_until(std::chrono::steady_clock::time_point deadline);

/// Makes the kernel ask the other end of a TCP connection for signs of life after `idle_s` seconds of silence, then
/// every `every_s` seconds. The kernel ends the connection after `tries` questions without an answer. A system that
/// refuses these limits keeps its own limits, which are hours.
void keep_alive(int socket, int idle_s, int every_s, int tries);

/// The result of an attempt to connect.
struct Connected {
  int socket = -1;  ///< the caller closes it; it is non-blocking, and exec closes it
  int error = 0;    ///< errno if there is no connection; ETIMEDOUT after the limit
};
/// Connects over TCP within `limit`. Nothing is sent.
Connected connect_in_time(const SocketAddress& there, std::chrono::milliseconds limit);

}  // namespace tessera
