#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/key_value_store.h"

namespace tessera {

/// Notices that the process of the next rank has ended, for whatever reason, and also if its other connections do not
/// show this. The next rank is the rank after this one; rank 0 comes after the last rank. An idle TCP connection leads
/// to the next rank, and the kernel of its host ends the connection with the process. Each rank therefore listens at a
/// port. A rank that connects sends a word that only users of the store can read, and receives nothing until the other
/// end is about to end well (tell_end). Only the end of the connection after that proves that the other end has ended:
/// its destructors may run long, and make calls. A process that has not sent the word is a stranger. The number of
/// strangers' connections is limited (take_watchers).
///
/// A host that vanishes sends nothing. The kernel therefore asks for a sign of life every few seconds (TCP's
/// keepalive), and ends the connection about nine seconds after the last sign. The process of the next rank does
/// nothing for this, so a process that computes, or that was stopped, is not taken to be gone.
///
/// RankWatch makes a NextRank if ranks communicate over Gloo or MPI, which may not notice the end of a connection. Only
/// the end of a connection that was once made counts. If a network refuses the port, no rank is watched, and no rank
/// counts as gone. The end of a connection counts only if no new connection can be made, since a firewall may end an
/// idle connection. A child process that was forked from the rank, and that runs no other program, keeps the port open
/// as long as it lives. CallWatch's thread makes all calls, through RankWatch, unless a function says otherwise.
class NextRank {
 public:
  /// Opens this rank's port. `address` is the numeric address at which the other ranks reach this host.
  NextRank(int rank, int world_size, std::string address);
  /// Watches the rank `watched` and not the next rank, and opens no port.
  explicit NextRank(int watched);
  ~NextRank();
  NextRank(const NextRank&) = delete;
  NextRank& operator=(const NextRank&) = delete;

  /// Returns the number of the rank that is watched.
  int rank() const { return next_; }

  /// The places that ranks tell each other through the store. The thread that exchanges them may still run when no
  /// other thread waits for it any more (ask_in_time), so this struct owns all its strings.
  struct Places {
    std::string own_key, own;  ///< this rank's address, port and word
    std::string next_key, next;
    void exchange(KeyValueStore& store);
  };
  /// Returns the addresses to exchange with the other ranks. `own` is "" if this rank has no port.
  Places places() const;

  /// Connects, or connects again, to `place`, the next rank's address, port and word. It takes a second at most.
  /// Returns false if that failed.
  bool connect(const std::string& place);
  bool is_connected() const { return connection_ >= 0; }  ///< true also for a connection that has ended
  /// Returns whether a connection to the next rank was made, or whether that rank is on a host that has vanished
  /// (go_on).
  bool is_watched() const;
  /// Returns whether the connection has ended and will not be made again: the next rank has announced that it ends
  /// well, or no new connection can be made. It takes a second at most. REQUIRES: is_watched().
  bool has_ended();
  /// Returns whether the rank at the other end of the connection has announced that it ends well.
  bool has_ended_well() const;
  /// Returns the latest report that the rank gave to `tell_end`; "" if it gave none, or if it has not ended yet.
  std::string end_report() const;

  /// Accepts the connections that wait at this rank's port. It keeps the connections of ranks that watch this rank
  /// until these connections end. It keeps the latest 64 of the other connections, so that strangers take neither the
  /// port's queue nor many descriptors.
  void take_watchers();
  /// Tells the ranks that watch this rank that it is about to end well. No rank then counts it as gone once its
  /// connections end. The call also sends them `report`, a text without line ends that they need in this case. A later
  /// call replaces the report. After the first call, no more connections are accepted. Any thread may call it.
  void tell_end(const std::string& report);
  /// Returns whether the next rank's host did not answer at all at the last attempt to connect.
  bool is_silent() const { return is_silent_; }
  /// Watches the rank after the next one from now on, since the next rank is gone or has ended well. If the host of the
  /// next rank was silent, other ranks of that host count as lost as soon as they do not answer either. No connection
  /// to them is needed. Returns false if no other rank is left.
  bool go_on();

 private:
  /// A connection to this rank's port.
  struct Watcher {
    int socket = -1;
    std::string said = {};  ///< bytes that were received over the connection, at most the length of the word
  };
  bool has_said_word(const Watcher& watcher) const { return watcher.said == word_; }
  /// Reads the bytes that have arrived. Returns false if the connection has ended, or if the bytes so far are not the
  /// beginning of the word.
  bool hear(Watcher& watcher) const;
  /// Returns whether the connection to the watched rank has ended. It ends with that rank's process, or earlier.
  bool is_at_end() const;

  const pid_t process_ = getpid();
  const int rank_, world_size_;
  int next_;
  const std::string address_;
  const std::string word_;        ///< word that a rank sends first if it watches this rank
  std::string place_;             ///< the next rank's address and port, once they are known
  std::string vanished_address_;  ///< address of a silent host that had a rank that is gone; "": none
  bool is_silent_ = false;
  int listener_ = -1, port_ = 0, connection_ = -1;
  Mutex mutex_;
  std::vector<Watcher> watchers_ ABSL_GUARDED_BY(mutex_);  ///< the oldest first
};

/// kAnyGoneRank is the store's list of ranks whose processes were seen to be gone. RankWatch::has_key reads it for a
/// question about kAnyGoneRank, and then answers questions about key_of_gone_rank without the store.
std::string key_of_gone_rank(int world_rank);
inline constexpr const char* kAnyGoneRank = "gone";

}  // namespace tessera
