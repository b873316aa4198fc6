#include "runtime/comm/socket_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace tessera {

int SocketAddress::port() const {
  return ntohs(is_ipv6() ? reinterpret_cast<const sockaddr_in6&>(storage).sin6_port
                         : reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

SocketAddress SocketAddress::with_port(int port) const {
  SocketAddress result = *this;
  const in_port_t number = htons(static_cast<std::uint16_t>(port));
  if (is_ipv6()) {
    reinterpret_cast<sockaddr_in6&>(result.storage).sin6_port = number;
  } else {
    reinterpret_cast<sockaddr_in&>(result.storage).sin_port = number;
  }
  return result;
}

SocketAddress numeric_address(const std::string& text, int port) {
  SocketAddress result;
  auto& four = reinterpret_cast<sockaddr_in&>(result.storage);
  auto& six = reinterpret_cast<sockaddr_in6&>(result.storage);
  if (inet_pton(AF_INET, text.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    result.length = sizeof four;
  } else if (inet_pton(AF_INET6, text.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    result.length = sizeof six;
  }
  return result.with_port(port);
}

std::chrono::milliseconds left_until(std::chrono::steady_clock::time_point deadline) {
  using std::chrono::milliseconds;
  return std::max(milliseconds(0),
                  std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now()));
}

void keep_alive(int socket, int idle_s, int every_s, int tries) {
  const auto set = [socket](int level, int option, int value) {
    ::setsockopt(socket, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_KEEPIDLE, idle_s);
  set(IPPROTO_TCP, TCP_KEEPINTVL, every_s);
  set(IPPROTO_TCP, TCP_KEEPCNT, tries);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
}

Connected connect_in_time(const SocketAddress& there, std::chrono::milliseconds limit) {
  const int fd = ::socket(there.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return {-1, errno};
  int error = ::connect(fd, there.raw(), there.length) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd writable{fd, POLLOUT, 0};
    socklen_t size = sizeof error;
    const auto deadline = std::chrono::steady_clock::now() + limit;
    int ready = -1;
    do {  // signals, such as those of a profiler, interrupt the wait
      ready = ::poll(&writable, 1, static_cast<int>(left_until(deadline).count()));
    } while (ready < 0 && errno == EINTR);
    error = ETIMEDOUT;
    if (ready > 0) ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error == 0) return {fd, 0};
  ::close(fd);
  return {-1, error};
}

}  // namespace tessera
