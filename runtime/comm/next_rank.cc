#include "runtime/comm/next_rank.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <utility>

#include "runtime/base/text.h"
#include "runtime/comm/socket_address.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kMost = 1s;  // time to connect
constexpr std::size_t kMostStrangers = 64;
constexpr std::size_t kLongestReports = std::size_t{1} << 17;
constexpr std::size_t kWordDigits = 16;

std::string key_of_place(int rank) { return "listens/" + std::to_string(rank); }

std::string address_of(const std::string& place) { return place.substr(0, place.find(' ')); }
std::string word_of(const std::string& place) { return place.substr(place.rfind(' ') + 1); }

/// Makes the kernel ask the other end for a sign of life, and end the connection about nine seconds after the last
/// sign. A system that refuses these limits keeps its own limits, which are hours.
void ask_for_life(int socket) { keep_alive(socket, /*idle_s=*/3, /*every_s=*/2, /*tries=*/3); }

}  // namespace

std::string key_of_gone_rank(int world_rank) { return std::string(kAnyGoneRank) + "/" + std::to_string(world_rank); }

NextRank::NextRank(int rank, int world_size, std::string address)
    : rank_(rank),
      world_size_(world_size),
      next_((rank + 1) % world_size),
      address_(std::move(address)),
      word_(random_word(kWordDigits)) {
  SocketAddress here = numeric_address(address_, 0);
  if (here.length == 0) return;
  const int fd = ::socket(here.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return;
  if (::bind(fd, here.raw(), here.length) == 0 && ::listen(fd, SOMAXCONN) == 0 &&
      ::getsockname(fd, here.raw(), &here.length) == 0) {
    listener_ = fd;
    port_ = here.port();
  } else {
    ::close(fd);
  }
}

NextRank::NextRank(int watched) : rank_(-1), world_size_(0), next_(watched) {}

NextRank::~NextRank() {
  if (connection_ >= 0) ::close(connection_);
  if (listener_ >= 0) ::close(listener_);
  for (const Watcher& each : watchers_) {
    // A forked process may have copies of these sockets. It must not end its parent's connections itself.
    if (getpid() == process_) ::shutdown(each.socket, SHUT_RDWR);
    ::close(each.socket);
  }
}

void NextRank::Places::exchange(KeyValueStore& store) {
  if (!own.empty()) store.set(own_key, own).IgnoreError();
  if (auto text = store.get(next_key, 0ms); text.ok()) next = *std::move(text);
}

NextRank::Places NextRank::places() const {
  return {.own_key = key_of_place(rank_),
          .own = listener_ < 0 ? "" : address_ + " " + std::to_string(port_) + " " + word_,
          .next_key = key_of_place(next_),
          .next = ""};
}

bool NextRank::connect(const std::string& place) {
  const std::size_t space = place.find(' ');
  if (space == std::string::npos) return false;
  const SocketAddress there = numeric_address(address_of(place), std::atoi(place.c_str() + space + 1));
  if (there.length == 0) return false;
  place_ = place;
  const Connected tried = connect_in_time(there, kMost);
  is_silent_ = tried.error == ETIMEDOUT || tried.error == EHOSTUNREACH || tried.error == ENETUNREACH;
  if (tried.error != 0) return false;
  if (connection_ >= 0) ::close(connection_);
  connection_ = tried.socket;
  ask_for_life(connection_);
  const std::string word = word_of(place);
  ::send(connection_, word.data(), word.size(), MSG_NOSIGNAL);
  return true;
}

bool NextRank::is_watched() const {
  return connection_ >= 0 || (!vanished_address_.empty() && address_of(place_) == vanished_address_);
}

bool NextRank::is_at_end() const {
  pollfd ended{connection_, POLLRDHUP, 0};  // poll also reports a connection that was reset
  return connection_ >= 0 && ::poll(&ended, 1, 0) > 0;
}

bool NextRank::has_ended() {
  return (connection_ < 0 || is_at_end()) && (has_ended_well() || !connect(std::string(place_)));
}

bool NextRank::has_ended_well() const {
  char word = 0;
  return connection_ >= 0 && ::recv(connection_, &word, 1, MSG_PEEK | MSG_DONTWAIT) == 1;
}

std::string NextRank::end_report() const {
  if (!is_at_end() || !has_ended_well()) return "";
  std::string reports(kLongestReports, '\0');
  const ssize_t got = ::recv(connection_, reports.data(), reports.size(), MSG_PEEK | MSG_DONTWAIT);
  if (got <= 0 || reports[static_cast<std::size_t>(got) - 1] != '\n') return "";
  reports.resize(static_cast<std::size_t>(got) - 1);
  return reports.substr(reports.rfind('\n') + 1);  // the whole text if there is only one report
}

bool NextRank::hear(Watcher& watcher) const {
  char bytes[kWordDigits];
  const std::size_t wanted = std::clamp<std::size_t>(word_.size() - watcher.said.size(), 1, sizeof bytes);
  const ssize_t got = ::recv(watcher.socket, bytes, wanted, MSG_DONTWAIT);
  if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
  if (has_said_word(watcher)) return true;  // a rank sends nothing after its word
  watcher.said.append(bytes, static_cast<std::size_t>(got));
  return word_.starts_with(watcher.said);
}

void NextRank::take_watchers() {
  const MutexLock lock(mutex_);
  std::vector<Watcher> kept;
  bool may_wait = true;
  for (std::size_t accepted = 0; may_wait && accepted < SOMAXCONN; accepted += kMostStrangers) {
    for (std::size_t i = 0; i < kMostStrangers; ++i) {
      const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      may_wait = socket >= 0;
      if (!may_wait) break;
      ask_for_life(socket);
      watchers_.push_back({socket});
    }
    std::size_t strangers = 0;  // the latest ones come first
    kept.clear();
    for (auto each = watchers_.rbegin(); each != watchers_.rend(); ++each) {
      const bool stays = hear(*each) && (has_said_word(*each) || ++strangers <= kMostStrangers);
      if (stays)
        kept.push_back(*each);
      else
        ::close(each->socket);
    }
    watchers_.assign(kept.rbegin(), kept.rend());
  }
}

void NextRank::tell_end(const std::string& report) {
  take_watchers();
  const MutexLock lock(mutex_);
  for (const Watcher& each : watchers_) {
    const std::string words = (has_said_word(each) ? report : "") + "\n";
    ::send(each.socket, words.data(), words.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  // The process may need seconds for the rest of its exit. A rank that connected during that time would receive nothing
  // before the connection ends, and might count this rank as gone.
  ::shutdown(listener_, SHUT_RD);
}

bool NextRank::go_on() {
  if (is_silent_) vanished_address_ = address_of(place_);
  if (connection_ >= 0) ::close(connection_);
  connection_ = -1;
  place_.clear();
  next_ = (next_ + 1) % world_size_;
  return next_ != rank_;
}

}  // namespace tessera
