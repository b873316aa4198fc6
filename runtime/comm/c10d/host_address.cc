#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/endpoint.h"
#include "runtime/comm/c10d/gloo_transport.h"
#include "runtime/comm/c10d/tcp_store.h"

namespace tessera {
namespace {

absl::Status address_error(const std::string& host, const std::string& why) {
  return make_error(ExitCode::kConfig, "cannot tell this host's address towards MASTER_ADDR " + host + ": " + why +
                                           ". [T0438] hint: set GLOO_SOCKET_IFNAME to the network interface to use");
}

// Returns the address from which this host would send. A connected UDP socket has this address as its own.
absl::StatusOr<std::string> source_address(const HostAddress& destination, const std::string& host) {
  const SocketAddress towards = destination.with_port(9);  // any port: nothing is sent to it
  const int fd = socket(towards.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return address_error(host, std::strerror(errno));
  SocketAddress source;
  source.length = sizeof source.storage;
  const bool known =
      connect(fd, towards.raw(), towards.length) == 0 && getsockname(fd, source.raw(), &source.length) == 0;
  const int error = errno;
  close(fd);
  if (!known) return address_error(host, std::strerror(error));
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(source.raw(), source.length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST))
    return address_error(host, "getnameinfo failed");
  return std::string(text.data());
}

}  // namespace

absl::StatusOr<std::string> address_towards(const std::string& host, double timeout_s) {
  if (is_loopback(host)) return std::string("127.0.0.1");
  const auto limit = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1000));
  TESSERA_ASSIGN_OR_RETURN(const HostAddress known, resolve_in_time(host, std::chrono::steady_clock::now() + limit));
  TESSERA_ASSIGN_OR_RETURN(std::string source, source_address(known, host));
  if (is_loopback(source)) return address_error(host, "its name leads to the loopback address " + source + " here");
  return source;
}

}  // namespace tessera
