#pragma once

#include <absl/status/statusor.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "runtime/comm/call_order.h"
#include "runtime/comm/in_time.h"
#include "runtime/comm/next_rank.h"

namespace tessera {

/// Returns the key under which the store has the WaitReport of a rank.
std::string key_of_report(int rank);

/// Watches the process of the next rank (NextRank), and in worlds of at most 64 ranks also the process of rank 0. A
/// rank that is gone is published in the store. A rank that has ended without an error has sent a report with the
/// number of calls that it has begun. The report is published too, and from then on the rank after that rank is
/// watched. CallWatch has one RankWatch. Only CallWatch's thread calls a RankWatch's functions, except where a function
/// says otherwise.
class RankWatch {
 public:
  /// A process that ends without an error may end while other processes are in their last call with it. The other ranks
  /// have this time to return from that call.
  static constexpr std::chrono::seconds kForLastCalls{3};

  /// `address` is the numeric address at which the other ranks reach this host. If it is "", no rank is watched. The
  /// object keeps a reference to `store`.
  RankWatch(int rank, int world_size, const std::string& address, OwnConnection& store);

  /// Lets a host be silent for `seconds` before it counts as gone. The first part of this time passes before the kernel
  /// finds that the host is silent. Call it before the first `look`.
  void bear_outages(double seconds);
  /// Returns whether any rank is watched. Any thread may call it.
  bool has_ranks() const { return next_.rank != nullptr; }
  /// Tells the ranks that watch this rank that this rank ends without an error, and sends its report. Any thread may
  /// call it. REQUIRES: has_ranks().
  void tell_end(const WaitReport& report) const { next_.rank->tell_end(report.to_text()); }

  /// Checks whether watched ranks have ended, and publishes their ends.
  void look();
  /// Returns the last reports of the ranks that have told this rank that they end well.
  const std::map<int, WaitReport>& ended() const { return ended_; }
  /// Returns whether the host of a rank that is gone did not answer, or whether the host of rank 0 has been silent for
  /// so long that it counts as gone.
  bool has_host_vanished();
  /// Asks the store whether it has `key`, over the watch's connection (Collectives::HasKey). If the store does not
  /// answer and a host has vanished (has_host_vanished), every key counts as existing, since this rank then waits for
  /// that host. For kAnyGoneRank, it reads which ranks are gone. It answers for key_of_gone_rank from what it has read
  /// so: each rank may ask about each other rank, and these would be too many requests for the store.
  absl::StatusOr<bool> has_key(const std::string& key);

  /// Notes that the program no longer waits long. An end of the store that was seen during this wait does not shorten
  /// the time of the next wait. If `also_of_first` is true, a silence of rank 0's host does not shorten that time
  /// either.
  void end_wait(bool also_of_first);
  /// Notes that the store has answered. A silence of rank 0's host is then over, and does not count towards the next
  /// silence.
  void end_silence();

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    std::unique_ptr<NextRank> rank;               ///< null: no rank is watched
    bool is_done = false;                         ///< true: its end was published, or it cannot be watched
    bool has_gone_on = false;                     ///< it is watched instead of a rank that has ended well
    int tries = 0;                                ///< number of requests for the watched rank's address; a request
                                                  ///< that gets the address counts as kMostTries / 10
    std::optional<Clock::time_point> ended = {};  ///< time from which the watched rank seemed to have ended
  };

  /// Connects to the next rank after it listens. Tells the store when the process of that rank has ended, or its host
  /// has vanished.
  void look_after_next();
  /// Watches the rank after the next rank from now on, since the next rank has ended well.
  void pass_over_next();
  /// Connects to rank 0 in the same way as look_after_next does to the next rank, but tells the store nothing.
  void look_after_first();
  /// Learns from a rank that has ended well how many calls it has begun, and tells the other ranks. Returns false if
  /// the rank has not sent this number.
  bool hear_end(const NextRank& rank);
  void find(Watched& watched);
  /// The first function returns whether rank 0 has announced that it ends well. The second returns whether the host of
  /// rank 0 has been silent for too long.
  bool has_first_ended_well() const;
  bool has_first_vanished();

  OwnConnection& store_;
  std::chrono::milliseconds silence_ = kForLastCalls;  ///< time without an answer after which a silent host is gone
  Watched next_;                    ///< no rank is watched unless the network library may miss ends of connections
  Watched first_;                   ///< rank 0, unless rank 0 is the next rank
  bool host_has_vanished_ = false;  ///< whether the host of a rank that is gone did not answer
  std::optional<Clock::time_point> store_ended_;
  std::map<std::string, Clock::time_point> gone_since_;  ///< when this rank learned that a rank is gone, by key
  std::map<int, WaitReport> ended_;                      ///< ranks that have told this rank that they end well
};

}  // namespace tessera
