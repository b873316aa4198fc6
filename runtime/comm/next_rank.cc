#include "runtime/comm/next_rank.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <utility>

#include "runtime/comm/socket_address.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kMost = 1s;  // time to connect

std::string key_of_place(int rank) { return "listens/" + std::to_string(rank); }

}  // namespace

std::string key_of_gone_rank(int world_rank) { return std::string(kAnyGoneRank) + "/" + std::to_string(world_rank); }

NextRank::NextRank(int rank, int world_size, std::string address)
    : rank_(rank), next_((rank + 1) % world_size), address_(std::move(address)) {
  SocketAddress here = numeric_address(address_, 0);
  if (here.length == 0) return;
  const int fd = ::socket(here.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return;
  if (::bind(fd, here.raw(), here.length) == 0 && ::listen(fd, SOMAXCONN) == 0 &&
      ::getsockname(fd, here.raw(), &here.length) == 0) {
    listener_ = fd;
    port_ = here.port();
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
  const SocketAddress there = numeric_address(place.substr(0, space), std::atoi(place.c_str() + space + 1));
  if (there.length == 0) return false;
  const Connected tried = connect_in_time(there, kMost);
  if (tried.error != 0) return false;
  if (connection_ >= 0) ::close(connection_);
  connection_ = tried.socket;
  place_ = place;
  return true;
}

// The other end sends nothing, so only an end can be read.
bool NextRank::has_ended() {
  pollfd readable{connection_, POLLIN, 0};
  return ::poll(&readable, 1, 0) > 0 && !connect(std::string(place_));
}

}  // namespace tessera
