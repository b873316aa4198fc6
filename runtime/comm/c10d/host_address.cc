#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/gloo_transport.h"
#include "runtime/comm/c10d/tcp_store.h"

namespace tessera {
namespace {

absl::Status address_error(const std::string& host, const std::string& why) {
  return make_error(ExitCode::kConfig, "cannot tell this host's address towards MASTER_ADDR " + host + ": " + why +
                                           "; set GLOO_SOCKET_IFNAME to the network interface to use");
}

// A connected UDP socket knows the address it would send from.
absl::StatusOr<std::string> source_address(const addrinfo& destination, const std::string& host) {
  const int fd = socket(destination.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return address_error(host, std::strerror(errno));
  sockaddr_storage source{};
  socklen_t length = sizeof source;
  const bool known = connect(fd, destination.ai_addr, destination.ai_addrlen) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&source), &length) == 0;
  const int error = errno;
  close(fd);
  if (!known) return address_error(host, std::strerror(error));
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(reinterpret_cast<sockaddr*>(&source), length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST))
    return address_error(host, "getnameinfo failed");
  return std::string(text.data());
}

}  // namespace

absl::StatusOr<std::string> address_towards(const std::string& host) {
  if (is_loopback(host)) return std::string("127.0.0.1");
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (const int error = getaddrinfo(host.c_str(), "9", &hints, &found)) return address_error(host, gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  TESSERA_ASSIGN_OR_RETURN(std::string source, source_address(*found, host));
  if (is_loopback(source)) return address_error(host, "its name leads to the loopback address " + source + " here");
  return source;
}

}  // namespace tessera
