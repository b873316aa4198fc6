#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

namespace tessera {

/// A listening socket on a loopback port that the kernel chooses.
struct Listener {
  Listener() : fd(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
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

/// A port on which nothing listens now.
inline int free_port() { return Listener().port; }

}  // namespace tessera
