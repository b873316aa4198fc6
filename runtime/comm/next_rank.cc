#include "runtime/comm/next_rank.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace tessera {
namespace {

using namespace std::chrono_literals;

constexpr int kMostMs = 1000;  // time to connect

/// A numeric address with a port, as the system takes it.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;  ///< 0: the text is no such address

  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
};

SocketAddress socket_address(const std::string& address, int port) {
  SocketAddress result;
  auto& four = reinterpret_cast<sockaddr_in&>(result.storage);
  auto& six = reinterpret_cast<sockaddr_in6&>(result.storage);
  if (inet_pton(AF_INET, address.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(static_cast<std::uint16_t>(port));
    result.length = sizeof four;
  } else if (inet_pton(AF_INET6, address.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(static_cast<std::uint16_t>(port));
    result.length = sizeof six;
  }
  return result;
}

int port_of(const SocketAddress& address) {
  return ntohs(address.storage.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in&>(address.storage).sin_port
                                                    : reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_port);
}

std::string key_of_place(int rank) { return "listens/" + std::to_string(rank); }

}  // namespace

std::string key_of_gone_rank(int world_rank) { return std::string(kAnyGoneRank) + "/" + std::to_string(world_rank); }

NextRank::NextRank(int rank, int world_size, std::string address)
    : rank_(rank), next_((rank + 1) % world_size), address_(std::move(address)) {
  SocketAddress here = socket_address(address_, 0);
  if (here.length == 0) return;
  const int fd = ::socket(here.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  if (::bind(fd, here.raw(), here.length) == 0 && ::listen(fd, SOMAXCONN) == 0 &&
      ::getsockname(fd, here.raw(), &here.length) == 0) {
    listener_ = fd;
    port_ = port_of(here);
  } else {
    ::close(fd);
  }
}

NextRank::~NextRank() {
  if (connection_ >= 0) ::close(connection_);
  if (listener_ >= 0) ::close(listener_);
}

void NextRank::Places::exchange(KeyValueStore& store) {
  if (!own.empty()) store.set(own_key, own).IgnoreError();
  if (auto text = store.get(next_key, 0ms); text.ok()) next = *std::move(text);
}

NextRank::Places NextRank::places() const {
  return {.own_key = key_of_place(rank_),
          .own = listener_ < 0 ? "" : address_ + " " + std::to_string(port_),
          .next_key = key_of_place(next_),
          .next = ""};
}

bool NextRank::connect(const std::string& place) {
  const std::size_t space = place.find(' ');
  if (space == std::string::npos) return false;
  SocketAddress there = socket_address(place.substr(0, space), std::atoi(place.c_str() + space + 1));
  if (there.length == 0) return false;
  const int fd = ::socket(there.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return false;
  int error = ::connect(fd, there.raw(), there.length) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd writable{fd, POLLOUT, 0};
    socklen_t size = sizeof error;
    error = ETIMEDOUT;
    if (::poll(&writable, 1, kMostMs) > 0) ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) {
    ::close(fd);
    return false;
  }
  if (connection_ >= 0) ::close(connection_);
  connection_ = fd;
  place_ = place;
  return true;
}

// The other end sends nothing, so only an end can be read.
bool NextRank::has_ended() {
  pollfd readable{connection_, POLLIN, 0};
  return ::poll(&readable, 1, 0) > 0 && !connect(std::string(place_));
}

}  // namespace tessera
