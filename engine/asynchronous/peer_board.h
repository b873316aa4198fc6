#pragma once

// See docs/glossary.md: unit.

#include <absl/functional/function_ref.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/comm/collectives.h"
#include "runtime/comm/process_handle.h"
#include "sharding/arena.h"

namespace tessera {

/// Lets ranks that do not wait for each other (SyncConfig, asynchronous) see how many steps each rank has made, and
/// whether its process still runs. The data lies in memory that all ranks map, so reading it costs a load, and nothing
/// is sent. ReplicaSync owns a PeerBoard, and the thread that trains calls it.
///
/// Ranks make no collective while they train, so the transport does not notice that a rank is gone. `wait` and `look`
/// notice it: they read each rank's state here, and check its process. If a rank is gone, they ask the transport, which
/// says which rank ended and why, as it does for a failed collective.
class PeerBoard {
 public:
  using Clock = std::chrono::steady_clock;

  /// Says whether ranks see each other's steps. kNothing: servers own the shards. The board then only counts this
  /// rank's steps and lets ranks meet, and `look` and `wait` are not called.
  enum class Sees { kOthers, kNothing };
  /// `group`: a group of all ranks. Only this object uses the group. Its ranks share memory if `sees` is kOthers.
  /// `timeout_s`: the longest wait. It is collective.
  PeerBoard(std::shared_ptr<Collectives> group, double timeout_s, Sees sees = Sees::kOthers);
  /// Tells the other ranks that this rank has left. If an exception destroys this object, tells them that this rank has
  /// failed.
  ~PeerBoard();
  PeerBoard(const PeerBoard&) = delete;
  PeerBoard& operator=(const PeerBoard&) = delete;

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  Collectives& group() const { return *group_; }

  /// These return the number of steps of `rank` whose backward is over, and the number of steps that it has applied or
  /// skipped.
  std::int64_t computed(int rank) const { return entries_[rank].computed.load(); }
  std::int64_t pushed(int rank) const { return entries_[rank].pushed.load(); }
  void note_computed(std::int64_t steps) { entries_[rank()].computed.store(steps); }
  void note_pushed(std::int64_t steps) { entries_[rank()].pushed.store(steps); }
  /// Returns the next number of a counter that all ranks share and that begins at 0.
  std::int64_t next_event() { return entries_[0].events.fetch_add(1); }

  /// A function that says whether a rank has reached the point for which this rank waits.
  using Arrived = absl::FunctionRef<bool(int rank)>;
  /// Makes a text with the unit and the operation for a message, such as "blocks.0 pull". Only a wait that fails calls
  /// it, so a step makes no text.
  using What = absl::FunctionRef<std::string()>;
  /// Waits until all ranks have arrived. At first it spins; later it sleeps, at most a millisecond at a time. Throws
  /// tessera::Error (75) as `look` does, and if a rank that has not arrived has left or does not come in time. If a
  /// rank has ended, the message is the transport's error, which says which rank ended and why. `spare`: the number of
  /// ranks that may have left without an error before they arrived, since the other ranks are enough.
  void wait(What what, Arrived arrived, std::int64_t spare = 0);
  /// Returns whether a wait that began at `begin` has lasted too long.
  bool is_late(Clock::time_point begin) const;
  /// Tells the other ranks that this rank has failed. The caller then throws an error, after which the Engine may still
  /// exist.
  void note_failed() { entries_[rank()].state.store(kFailed); }
  /// Returns a text such as "rank 2 (pid 4711)".
  std::string name_of(int rank) const;
  /// Throws tessera::Error (75) if a rank has failed or its process is gone. The check is made at most every 50 ms.
  void look();
  /// Looks for a rank that has ended, for at most a second, and throws as `look` does if it finds one. REQUIRES: a rank
  /// has ended or is about to end.
  void look_for_the_dead();
  /// Returns once all ranks have called it. It is collective.
  void meet(const char* what);

 private:
  enum State : std::uint32_t { kRunning, kFailed, kLeft };
  /// The fields of one rank. Only that rank writes them, apart from `events` of rank 0.
  struct alignas(128) Entry {
    std::atomic<std::int64_t> computed, pushed, events, process;
    std::atomic<std::uint32_t> state;
  };

  bool is_gone(int rank) const;
  void expect_enough(Arrived arrived, std::int64_t spare);
  [[noreturn]] void end_because_of(int rank);
  [[noreturn]] void end_late(What what, Arrived arrived);

  const std::shared_ptr<Collectives> group_;
  const double timeout_s_;
  const int exceptions_at_start_;
  Arena memory_;
  Entry* entries_ = nullptr;  ///< [rank]
  std::vector<ProcessHandle> processes_;
  Clock::time_point looked_;
};

}  // namespace tessera
