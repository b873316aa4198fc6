#include "engine/asynchronous/servers/server_link.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>
#include <thread>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"
#include "runtime/comm/c10d/endpoint.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

struct Place {
  std::string host;
  int port = 0;
};

absl::StatusOr<Place> place_of(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  std::string_view host = std::string_view(address).substr(0, colon == std::string::npos ? 0 : colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  Place place{std::string(host)};
  const char* const begin = address.data() + (colon == std::string::npos ? 0 : colon + 1);
  const char* const end = address.data() + address.size();
  const auto [rest, error] = std::from_chars(begin, end, place.port);
  if (host.empty() || error != std::errc() || rest != end || place.port < 0 || place.port > 65535)
    return make_error(ExitCode::kConfig,
                      "\"" + address +
                          "\" is no address of a parameter server. [T0973] hint: write HOST:PORT, as in "
                          "10.0.0.5:4711 or [::1]:4711");
  return place;
}

absl::Status lost(const std::string& why) {
  return make_error(ExitCode::kPeerLost,
                    why +
                        ". [T0974] hint: what the process at the other end printed last, or its launcher, "
                        "says why; shards of a server that has ended are gone, so go on from a "
                        "checkpoint");
}

absl::Status unreached(const std::string& why) {
  return make_error(ExitCode::kPeerLost,
                    why +
                        ". [T0975] hint: start that server (`tessera serve`), and see whether this host "
                        "may reach its port (comm.init_timeout_s is how long it is tried)");
}

}  // namespace

ServerLink::ServerLink(int socket) : socket_(socket) {
  const int on = 1;
  ::setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  keep_alive(socket_, /*idle_s=*/30, /*every_s=*/10, /*tries=*/3);  // a host that loses power closes no connection
}

ServerLink::~ServerLink() { ::close(socket_); }

absl::StatusOr<std::unique_ptr<ServerLink>> ServerLink::connect(const std::string& address,
                                                                Clock::time_point deadline) {
  TESSERA_ASSIGN_OR_RETURN(const Place place, place_of(address));
  const auto host = resolve_in_time(place.host, deadline);
  if (!host.ok()) return unreached("no address of its host is known");
  for (milliseconds pause(20);; pause = std::min(2 * pause, milliseconds(500))) {
    const Connected tried = connect_in_time(host->with_port(place.port), left_until(deadline));
    if (tried.error == 0) return std::make_unique<ServerLink>(tried.socket);
    if (left_until(deadline) <= pause) return unreached("no parameter server answers: " + errno_text(tried.error));
    std::this_thread::sleep_for(pause);
  }
}

absl::Status ServerLink::wait_for(short event, Limit limit) const {
  const Clock::time_point deadline = Clock::now() + limit.value_or(milliseconds(0));
  for (;;) {
    pollfd ready{socket_, event, 0};
    const int found = ::poll(&ready, 1, limit ? static_cast<int>(left_until(deadline).count()) : -1);
    if (found > 0) return absl::OkStatus();
    if (found == 0) return lost("no answer within " + std::to_string(limit->count() / 1000) + " s");
    if (errno != EINTR) return lost("poll: " + errno_text(errno));
  }
}

absl::Status ServerLink::wait_to_receive(Limit limit) const { return wait_for(POLLIN, limit); }

absl::StatusOr<std::size_t> ServerLink::send_some(std::span<const std::byte> bytes, bool more) {
  for (;;) {
    const ssize_t sent =
        ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT | (more ? MSG_MORE : 0));
    if (sent >= 0) return static_cast<std::size_t>(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::size_t{0};
    if (errno != EINTR) return lost("the connection is broken: " + errno_text(errno));
  }
}

absl::StatusOr<std::size_t> ServerLink::receive_some(std::span<std::byte> bytes) {
  for (;;) {
    const ssize_t got = ::recv(socket_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got > 0) return static_cast<std::size_t>(got);
    if (got == 0) return lost("the connection was closed");
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::size_t{0};
    if (errno != EINTR) return lost("the connection is broken: " + errno_text(errno));
  }
}

absl::Status ServerLink::send(std::span<const std::byte> bytes, Limit limit, bool more) {
  while (!bytes.empty()) {
    TESSERA_ASSIGN_OR_RETURN(const std::size_t sent, send_some(bytes, more));
    if (sent == 0) TESSERA_RETURN_IF_ERROR(wait_for(POLLOUT, limit));
    bytes = bytes.subspan(sent);
  }
  return absl::OkStatus();
}

absl::Status ServerLink::send(MessageHead head, std::span<const std::byte> payload, Limit limit) {
  head.bytes = static_cast<std::int64_t>(payload.size());
  TESSERA_RETURN_IF_ERROR(send(bytes_of(head), limit, /*more=*/!payload.empty()));
  return send(payload, limit);
}

absl::Status ServerLink::receive(std::span<std::byte> bytes, Limit limit) {
  while (!bytes.empty()) {
    TESSERA_ASSIGN_OR_RETURN(const std::size_t got, receive_some(bytes));
    if (got == 0) TESSERA_RETURN_IF_ERROR(wait_for(POLLIN, limit));
    bytes = bytes.subspan(got);
  }
  return absl::OkStatus();
}

absl::Status ServerLink::refuse(ExitCode code, const std::string& text, Limit limit) {
  const MessageHead head{.kind = MessageKind::kRefused, .first = static_cast<std::int64_t>(code)};
  return send(head, std::as_bytes(std::span(text)), limit);
}

absl::Status ServerLink::refuse(const absl::Status& why, Limit limit) {
  return refuse(exit_code_of(why), message_of(why), limit);
}

absl::StatusOr<MessageHead> ServerLink::receive_head(Limit limit) {
  MessageHead head;
  TESSERA_RETURN_IF_ERROR(receive(std::as_writable_bytes(std::span<MessageHead, 1>(&head, 1)), limit));
  if (head.magic != MessageHead::kMagic || head.bytes < 0) return lost("what came is no message of a parameter server");
  return head;
}

bool ServerLink::is_closed() const {
  std::byte next{};
  const ssize_t got = ::recv(socket_, &next, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

void ServerLink::shut() { ::shutdown(socket_, SHUT_RDWR); }

absl::StatusOr<ServerSocket> listen_for_workers(const std::string& address) {
  TESSERA_ASSIGN_OR_RETURN(const Place place, place_of(address));
  const auto host = resolve_in_time(place.host, ServerLink::Clock::now() + std::chrono::seconds(10));
  if (!host.ok())
    return make_error(ExitCode::kConfig, "parameter server: the host of " + address +
                                             " is not known here. [T0976] hint: listen at an address of this machine");
  const int fd = ::socket(host->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return make_error(ExitCode::kOsResource, "parameter server: no socket: " + reason_of(errno));
  const int on = 1;  // a port counts as free in spite of connections of an ended job
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  SocketAddress bound = host->with_port(place.port);
  if (::bind(fd, bound.raw(), bound.length) != 0 || ::listen(fd, SOMAXCONN) != 0 ||
      ::getsockname(fd, bound.raw(), &bound.length) != 0) {
    const int error = errno;
    ::close(fd);
    return make_error(ExitCode::kUnavailable, "parameter server: cannot listen at " + address + ": " +
                                                  errno_text(error) +
                                                  ". [T0977] hint: take an address of this machine and a free port");
  }
  const std::string text = host->is_ipv6() ? "[" + host->text + "]" : host->text;
  return ServerSocket{fd, text + ":" + std::to_string(bound.port())};
}

}  // namespace tessera
