#include "runtime/comm/c10d/strangers.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/mutex.h"
#include "runtime/comm/socket_address.h"

namespace tessera {

// This file shuts down idle connections of strangers before these connections take all descriptors.
//
// One thread of the process waits for connections to the watched sockets (Watch::run). `look` then checks whether many
// descriptors are open, by the number of a new descriptor (`are_few_open`). If so, it goes over all descriptors, and
// shuts down the oldest connections over which no bytes have arrived (`shut_down_oldest`). If connections come faster
// than they can be shut down, the kernel drops requests for new connections for a while (`let_in`).

namespace {

constexpr int kMostGap = 256;  // number of unused descriptors in a row after which the search ends
constexpr std::chrono::microseconds kTimeToAccept{200}, kLongPause{100'000};
constexpr int kMostInARow = 10'000;
constexpr int kBetweenLooksMs = 5;  // pause between two searches while connections are shut down
/// Time in which the owners of sockets close the connections that were shut down.
constexpr std::chrono::seconds kMostClosed{1};

/// Calls `look(fd)` for each descriptor of this process, in order of their numbers. Reading /proc would need a free
/// descriptor.
template <class Look>
void for_each_descriptor(const Look& look) {
  for (int fd = 0, gap = 0; gap < kMostGap; ++fd) {
    gap = ::fcntl(fd, F_GETFD) < 0 ? gap + 1 : 0;
    if (gap == 0) look(fd);
  }
}

bool is_listening(int fd) {
  int listens = 0;
  socklen_t size = sizeof listens;
  return ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) == 0 && listens != 0;
}

/// Returns the local port of a TCP socket, or the port of its other end if `name` is ::getpeername; 0 for other files.
int port_of(int fd, int (*name)(int, sockaddr*, socklen_t*) = ::getsockname) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  if (name(fd, reinterpret_cast<sockaddr*>(&address), &length) != 0) return 0;
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return 0;
}

/// Returns whether no bytes have arrived over a connection yet.
bool has_sent_nothing(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
         size >= offsetof(tcp_info, tcpi_bytes_received) + sizeof info.tcpi_bytes_received &&
         info.tcpi_state == 1 /* established */ && info.tcpi_bytes_received == 0;
}

std::size_t most_unproven() {
  constexpr std::size_t kMost = 4096;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMost;
  return std::min<std::size_t>(kMost, limit.rlim_cur / 16);
}

/// Makes the kernel drop requests for new connections to a listening socket, or accept them again. A client whose
/// request was dropped asks again after a second. All other packets must pass, since connections have the filter of
/// their listener too.
void let_in(int listener, bool open) {
  constexpr unsigned kFlags = 13, kSynAndAck = 0x12, kSyn = 0x02, kWhole = 0xffffffff;  // kFlags: byte of TCP's header
  sock_filter program[] = {BPF_STMT(BPF_LD | BPF_B | BPF_ABS, kFlags), BPF_STMT(BPF_ALU | BPF_AND | BPF_K, kSynAndAck),
                           BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kSyn, 0, 1), BPF_STMT(BPF_RET | BPF_K, 0),
                           BPF_STMT(BPF_RET | BPF_K, kWhole)};
  const sock_fprog filter{static_cast<unsigned short>(std::size(program)), program};
  ::setsockopt(listener, SOL_SOCKET, open ? SO_DETACH_FILTER : SO_ATTACH_FILTER, &filter, sizeof filter);
}

class Watch {
 public:
  /// Returns the watch of this process. It is never destroyed, since its thread uses it to the end.
  static Watch& of_process() {
    static Watch* const watch = new Watch;
    return *watch;
  }

  void add(int listener) {
    const MutexLock lock(mutex_);
    if (!is_running_in_this_process()) start();
    if (epoll_ < 0) return;
    ports_.insert(port_of(listener));
    listeners_.push_back(listener);
    epoll_event event{};
    event.events = EPOLLIN;
    // epoll does not keep a socket open: the socket leaves the set when its owner closes it.
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, listener, &event);
  }

 private:
  /// Returns false in a forked process, which has no threads of its parent.
  bool is_running_in_this_process() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return process_ == ::getpid(); }

  void start() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    process_ = ::getpid();
    ports_.clear();
    listeners_.clear();
    is_open_ = true;
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    if (epoll_ < 0) return;
    try {
      std::thread([this, epoll = epoll_] { run(epoll); }).detach();
    } catch (const std::system_error&) {
      log_warning("no thread can be had that looks after idle connections of strangers");
    }
  }

  void run(int epoll) {
    epoll_event event{};
    int in_a_row = 0;
    Found found = Found::kFew;
    while (true) {
      const int ready = ::epoll_wait(epoll, &event, 1, 0);
      if (ready == 0) in_a_row = 0;
      const int most_ms = found == Found::kFlood ? kBetweenLooksMs : -1;
      if ((ready == 0 ? ::epoll_wait(epoll, &event, 1, most_ms) : ready) < 0 && errno != EINTR) return;
      // Connections that nobody accepts must not keep this thread busy. Such connections exist if a forked process has
      // a copy of the socket.
      std::this_thread::sleep_for(in_a_row < kMostInARow ? kTimeToAccept : kLongPause);
      const MutexLock lock(mutex_);
      found = look();
      in_a_row = found == Found::kFew ? in_a_row + 1 : 0;
    }
  }

  enum class Found {
    kFew,    ///< few descriptors are open, so there is nothing to look for
    kMany,   ///< many are open, but idle connections of strangers are within their limit
    kFlood,  ///< strangers' connections were shut down, so the next search is soon
  };

  Found look() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const std::size_t most = most_unproven();
    bound_queues(most);
    if (are_few_open(most)) {
      let_in_all(true);
      return Found::kFew;
    }
    // Shutting down takes longer than connecting. The number of connections that wait in the queues is limited by now.
    if (!are_few_open(2 * most)) let_in_all(false);
    const auto now = std::chrono::steady_clock::now();
    if (shut_down_oldest(most)) shut_down_at_ = now;
    // The owners of the connections that were shut down need a moment to close them.
    if (shut_down_at_ == now || (now - shut_down_at_ < kMostClosed && !are_few_open(2 * most))) return Found::kFlood;
    let_in_all(true);
    return Found::kMany;
  }

  /// Limits the number of connections that wait to be accepted. The owner of a socket may have changed this limit.
  void bound_queues(std::size_t most) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::erase_if(listeners_, [&](int fd) {
      mutex_.expect_held();
      return !is_listening(fd) || ports_.count(port_of(fd)) == 0;
    });
    const auto longest = static_cast<int>(std::clamp<std::size_t>(most, 16, SOMAXCONN));
    for (const int listener : listeners_) ::listen(listener, longest);
  }

  void let_in_all(bool open) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (open == is_open_) return;
    is_open_ = open;
    for (const int listener : listeners_) let_in(listener, open);
  }

  /// Returns whether few descriptors are open. The number of a new descriptor shows this, since it is the lowest free
  /// number. This takes two system calls, however many descriptors are open.
  static bool are_few_open(std::size_t most) {
    const int next = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (next >= 0) ::close(next);
    return next >= 0 && static_cast<std::size_t>(next) < most;
  }

  /// Shuts down the oldest silent connections, so that `most` of them remain. Returns whether it shut any down.
  bool shut_down_oldest(std::size_t most) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    struct Unproven {
      std::uint64_t order;
      int fd;
      ino_t socket;
    };
    std::vector<Unproven> unproven;
    std::map<ino_t, std::uint64_t> still_there;
    std::set<int> listening;
    for_each_descriptor([&](int fd) {
      mutex_.expect_held();
      const int port = port_of(fd);
      if (ports_.count(port) == 0) return;
      struct stat info {};
      if (is_listening(fd)) {
        listening.insert(port);
      } else if (has_sent_nothing(fd) && ::fstat(fd, &info) == 0) {
        const auto known = order_.find(info.st_ino);
        const std::uint64_t order = known == order_.end() ? next_order_++ : known->second;
        still_there[info.st_ino] = order;
        unproven.push_back({order, fd, info.st_ino});
      }
    });
    order_ = std::move(still_there);
    ports_ = std::move(listening);
    if (unproven.size() <= most) return false;
    std::ranges::sort(unproven, {}, &Unproven::order);
    unproven.resize(unproven.size() - most);
    if (!std::exchange(has_warned_, true))
      log_warning("strangers hold more than " + std::to_string(most) +
                  " idle connections to this job's ports; the oldest are shut down. [T0439] hint: SECURITY.md says "
                  "which ports want a firewall");
    for (const Unproven& each : unproven) shut_down(each.fd, each.socket);
    return true;
  }

  /// Shuts a connection down. The descriptor's number may belong to another file by now, so a duplicate of the
  /// descriptor is checked. If no duplicate can be made, the socket is shut down unchecked.
  static void shut_down(int fd, ino_t socket) {
    const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
    struct stat info {};
    if (copy < 0 || (::fstat(copy, &info) == 0 && info.st_ino == socket && has_sent_nothing(copy)))
      ::shutdown(copy < 0 ? fd : copy, SHUT_RDWR);
    if (copy >= 0) ::close(copy);
  }

  Mutex mutex_;
  pid_t process_ ABSL_GUARDED_BY(mutex_) = -1;
  int epoll_ ABSL_GUARDED_BY(mutex_) = -1;
  std::set<int> ports_ ABSL_GUARDED_BY(mutex_);  ///< ports of the watched sockets
  std::vector<int> listeners_ ABSL_GUARDED_BY(mutex_);
  bool is_open_ ABSL_GUARDED_BY(mutex_) = true;  ///< whether the watched sockets accept new connections
  std::chrono::steady_clock::time_point shut_down_at_ ABSL_GUARDED_BY(mutex_) = {};
  /// order in which idle connections were first seen, by socket
  std::map<ino_t, std::uint64_t> order_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t next_order_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_warned_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

void watch_for_strangers(int listener) { Watch::of_process().add(listener); }

void keep_from_idling(int port) {
  if (port == 0) return;  // the store is no server at a port
  for_each_descriptor([port](int fd) {
    if (port_of(fd, ::getpeername) == port) keep_alive(fd, /*idle_s=*/30, /*every_s=*/30, /*tries=*/127);
  });
}

std::vector<int> listening_sockets() {
  std::vector<int> sockets;
  for_each_descriptor([&](int fd) {
    if (is_listening(fd) && port_of(fd) != 0) sockets.push_back(fd);
  });
  return sockets;
}

}  // namespace tessera
