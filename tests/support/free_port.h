#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace tessera {

/// A listening socket on a loopback port: the port `wanted` if it is free, and otherwise a port that the kernel
/// chooses.
struct Listener {
  explicit Listener(int wanted = 0) : fd(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(wanted));
    socklen_t length = sizeof address;
    bind(fd, reinterpret_cast<sockaddr*>(&address), length);
    listen(fd, 1);
    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
    port = ntohs(address.sin_port);
  }
  ~Listener() { close(fd); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  int fd, port = 0;
};

/// Returns a port on which no process listens now. The port lies below the ports that the kernel gives to connections,
/// and processes with neighbouring numbers get different ports. So no other process takes the port before it is used.
inline int free_port() {
  constexpr int kFirst = 10'240, kPorts = 21'760, kOfProcess = 16;
  static std::atomic<int> next = 0;
  for (;;) {
    const int port = kFirst + static_cast<int>((std::int64_t{getpid()} * kOfProcess + next++) % kPorts);
    if (Listener(port).port == port) return port;
  }
}

}  // namespace tessera
