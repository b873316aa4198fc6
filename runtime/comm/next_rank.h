#pragma once

#include <string>

#include "runtime/comm/key_value_store.h"

namespace tessera {

/// Notices that the process of the next rank (the rank after the own one; after the last comes 0) has ended, however it
/// ended and whatever its other connections say: an idle TCP connection leads there, and the kernel of that host ends
/// it with the process. Each rank therefore listens at a port. Connections wait in the kernel's queue, which costs no
/// descriptor, and nothing is sent over them until the rank is about to end well (tell_end).
///
/// A host that vanishes says nothing, so the kernel asks for a sign of life every few seconds (TCP's keepalive), and
/// ends the connection about nine seconds after the last one. The process there need not do anything for it, so one
/// that computes, or that was stopped, is not taken for gone.
///
/// CallWatch makes one where ranks talk over Gloo, which may lose the end of a connection. Only the end of a connection
/// that was once made counts, so a network that refuses the port means that nobody is watched, and never that a rank is
/// gone. It counts only if no new connection can be made: a firewall may end an idle one. A child process that was
/// forked from the rank, and that runs no other program, keeps the port open as long as it lives. It is not
/// thread-safe.
class NextRank {
 public:
  /// Opens this rank's port. `address`: the numeric address at which the other ranks reach this host.
  NextRank(int rank, int world_size, std::string address);
  /// Watches another rank than the next one, and opens no port.
  explicit NextRank(int watched);
  ~NextRank();
  NextRank(const NextRank&) = delete;
  NextRank& operator=(const NextRank&) = delete;

  /// Returns the number of the rank that is watched.
  int rank() const { return next_; }

  /// The places that ranks tell each other through the store. A thread that may be left behind asks, so this owns all.
  struct Places {
    std::string own_key, own;  ///< this rank's address and port
    std::string next_key, next;
    void exchange(KeyValueStore& store);
  };
  /// Returns what to exchange with the other ranks. `own` is "" if this rank has no port.
  Places places() const;

  /// Connects to `place`, the next rank's address and port, also anew. It takes a second at most. Returns false if that
  /// failed.
  bool connect(const std::string& place);
  bool is_connected() const { return connection_ >= 0; }  ///< or was, before it ended
  /// Returns whether the next rank was connected to, or is on a host that has vanished (go_on).
  bool is_watched() const;
  /// Returns whether there is no connection any more, and the next rank takes no other. It takes a second at most.
  /// REQUIRES: is_watched().
  bool has_ended();
  /// Returns whether the rank that was connected to has told its end.
  bool has_ended_well() const;
  /// Tells those that watch this rank that it ends well, so that nobody counts it as gone, and takes no other
  /// connection any more. Any thread may call it.
  void tell_end() const;
  /// Returns whether the next rank's host did not answer at all when it was last connected to.
  bool is_silent() const { return is_silent_; }
  /// Watches the rank after the next one from now on, since the next one is gone or has ended well. If its host was
  /// silent, other ranks of that host are gone as soon as they do not answer either, without a connection to them.
  /// Returns false if no other rank is left.
  bool go_on();

 private:
  const int rank_, world_size_;
  int next_;
  const std::string address_;
  std::string place_;             ///< address and port of the next rank, once they are known
  std::string vanished_address_;  ///< that of a host of which a rank was gone, and that did not answer; "": none
  bool is_silent_ = false;
  int listener_ = -1, port_ = 0, connection_ = -1;
};

/// Returns the key that the store has once a rank's process was seen to be gone, and the key that it has once any was.
std::string key_of_gone_rank(int world_rank);
inline constexpr const char* kAnyGoneRank = "gone";

}  // namespace tessera
