#include "workshop/launch/hosts/job_address.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

/// An address of IPv4 or IPv6. Its port has no meaning.
struct Address {
  sockaddr_storage bytes{};
  socklen_t length = sizeof(sockaddr_storage);

  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&bytes); }
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&bytes); }

  bool is_loopback() const {
    if (bytes.ss_family == AF_INET)
      return (ntohl(reinterpret_cast<const sockaddr_in*>(&bytes)->sin_addr.s_addr) >> 24) == 127;
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&bytes)->sin6_addr);
  }
  std::string text() const {
    std::array<char, NI_MAXHOST> name{};
    ::getnameinfo(raw(), length, name.data(), name.size(), nullptr, 0, NI_NUMERICHOST);
    return name.data();
  }
};

/// Returns all addresses of a host, those of IPv4 first. The result is empty if the name is unknown.
std::vector<Address> resolve(const std::string& name) {
  addrinfo wanted{};
  wanted.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  std::vector<Address> addresses;
  if (::getaddrinfo(name.c_str(), "9", &wanted, &found) != 0) return addresses;
  for (const addrinfo* each = found; each; each = each->ai_next) {
    if (each->ai_family != AF_INET && each->ai_family != AF_INET6) continue;
    Address& address = addresses.emplace_back();
    std::memcpy(&address.bytes, each->ai_addr, each->ai_addrlen);
    address.length = each->ai_addrlen;
  }
  ::freeaddrinfo(found);
  std::ranges::stable_partition(addresses, [](const Address& a) { return a.bytes.ss_family == AF_INET; });
  return addresses;
}

/// Returns whether this machine has the address. A socket can be bound only to an address of this machine.
bool is_ours(Address address) {
  if (address.bytes.ss_family == AF_INET)
    reinterpret_cast<sockaddr_in*>(&address.bytes)->sin_port = 0;
  else
    reinterpret_cast<sockaddr_in6*>(&address.bytes)->sin6_port = 0;
  const int fd = ::socket(address.bytes.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool ours = fd >= 0 && ::bind(fd, address.raw(), address.length) == 0;
  if (fd >= 0) ::close(fd);
  return ours;
}

/// Returns the address of this machine from which packets to `there` are sent. Nothing is sent here.
std::string way_to(const Address& there) {
  const int fd = ::socket(there.bytes.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  Address here;
  const bool known =
      fd >= 0 && ::connect(fd, there.raw(), there.length) == 0 && ::getsockname(fd, here.raw(), &here.length) == 0;
  if (fd >= 0) ::close(fd);
  // A route over the loopback interface leads to no other machine, unless the other "host" is this machine too.
  return known && here.is_loopback() == there.is_loopback() ? here.text() : "";
}

std::string own_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace

absl::Status check_first_host(const HostSlots& first) {
  const std::string name = address_of(first), own = own_name();
  if (name == "localhost" || name == own || name == own.substr(0, own.find('.'))) return absl::OkStatus();
  if (std::ranges::any_of(resolve(name), is_ours)) return absl::OkStatus();
  return make_error(
      ExitCode::kUsage,
      fmt::format("launch: the first host, {}, is not this machine, {}. [T0853] hint: start the launcher on the "
                  "first host, or name this machine first",
                  clipped(first.name, 80), clipped(own, 80)));
}

absl::StatusOr<std::string> job_address(const std::vector<HostSlots>& hosts) {
  for (const Address& address : resolve(address_of(hosts.front())))
    if (!address.is_loopback() && is_ours(address)) return address.text();
  for (std::size_t i = 1; i < hosts.size(); ++i)
    for (const Address& address : resolve(address_of(hosts[i])))
      if (std::string way = way_to(address); !way.empty()) return way;
  return make_error(
      ExitCode::kUsage,
      fmt::format("launch: no address of this machine is known by which host {} may reach it. [T0854] hint: name "
                  "one by --address",
                  clipped(hosts[1].name, 80)));
}

}  // namespace tessera
