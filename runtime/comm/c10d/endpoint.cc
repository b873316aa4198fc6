#include "runtime/comm/c10d/endpoint.h"

#include <netdb.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <thread>

#include "runtime/base/status.h"
#include "runtime/comm/in_time.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{20}, kLongestPause{1000};

std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  ::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  return text.data();
}

/// One look-up. `error` is the error of the resolver, 0 if the name was found.
struct LookUp {
  int error = EAI_AGAIN;
  HostAddress found;
};

LookUp look_up(const std::string& host) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  LookUp result;
  result.error = ::getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (result.error != 0) return result;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  const addrinfo* chosen = list;
  for (const addrinfo* each = list; each; each = each->ai_next) {
    if (each->ai_family != AF_INET) continue;
    chosen = each;
    break;
  }
  std::memcpy(&result.found.storage, chosen->ai_addr, chosen->ai_addrlen);
  result.found.length = chosen->ai_addrlen;
  result.found.text = numeric(chosen->ai_addr, chosen->ai_addrlen);
  return result;
}

}  // namespace

absl::StatusOr<HostAddress> resolve_in_time(const std::string& host, Clock::time_point deadline) {
  const auto error = [&](const std::string& why) {
    return make_error(ExitCode::kPeerLost, "no address of host " + host + " is known: " + why +
                                               ". [T0431] hint: MASTER_ADDR must name the host of rank 0 as this host "
                                               "knows it (comm.init_timeout_s is how long it is looked for)");
  };
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    // A resolver may take half a minute for an unknown name. This function then no longer waits for the thread that
    // asks the resolver.
    const auto latest = std::make_shared<LookUp>();
    const auto limit = left_until(deadline);
    if (!ends_in_time([host, latest] { *latest = look_up(host); }, limit))
      return error("the resolver did not answer within " + std::to_string(limit.count() / 1000) + " s");
    if (latest->error == 0) return latest->found;
    if (left_until(deadline) <= pause) return error(::gai_strerror(latest->error));
    std::this_thread::sleep_for(pause);
  }
}

constexpr const char kListenerHint[] =
    ". [T0432] hint: start rank 0, and look whether this host may reach that port (nc -zv HOST PORT); a start that "
    "takes longer needs a larger comm.init_timeout_s";

absl::Status wait_for_listener(const HostAddress& host, int port, Clock::time_point deadline) {
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    const Connected tried = connect_in_time(host.with_port(port), left_until(deadline));
    if (tried.error == 0) {
      ::close(tried.socket);
      return absl::OkStatus();
    }
    if (left_until(deadline) <= pause)
      return make_error(ExitCode::kPeerLost, std::strerror(tried.error) + std::string(kListenerHint));
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace tessera
