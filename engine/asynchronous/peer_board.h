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
#include "runtime/comm/shared/process_handle.h"
#include "sharding/arena.h"

namespace tessera {

/// Tells ranks that do not wait for each other (SyncConfig, asynchronous) about one another: how many steps each rank
/// has made, and whether its process still runs. It lies in memory that all of them map, so a look costs a load and
/// sends nothing. ReplicaSync owns one; the thread that trains calls it.
///
/// Ranks make no collective while they train, so nothing of the transport notices that one is gone. `wait` and `look`
/// do: they read each rank's state here and its process. They ask the transport about what they find; it says who ended
/// and why, as it does for a failed collective.
class PeerBoard {
 public:
  using Clock = std::chrono::steady_clock;

  /// What ranks know of one another. kNothing: servers own the shards, and the board only counts this rank's steps and
  /// lets ranks meet; `look` and `wait` are not called.
  enum class Sees { kOthers, kNothing };
  /// `group`: a group of all ranks that only this object uses; its ranks share memory if they see each other.
  /// `timeout_s`: the longest wait. It is collective.
  PeerBoard(std::shared_ptr<Collectives> group, double timeout_s, Sees sees = Sees::kOthers);
  /// Tells the others that this rank has left, or that it has failed if an exception destroys this object.
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
  /// Returns the next number of a count that all ranks share, from 0.
  std::int64_t next_event() { return entries_[0].events.fetch_add(1); }

  /// A function that says whether a rank has reached the point for which this rank waits.
  using Arrived = absl::FunctionRef<bool(int rank)>;
  /// Makes the unit and operation for a message, such as "blocks.0 pull". Only a wait that fails calls it, so a step
  /// makes no text.
  using What = absl::FunctionRef<std::string()>;
  /// Waits until all ranks have arrived: it spins, then sleeps at most a millisecond at a time. Throws tessera::Error
  /// (75) if a rank that has not arrived has ended, or does not come in time. The message says what the transport knows
  /// about that rank.
  /// `spare`: this many ranks may have left without an error before they arrived, since the others are enough.
  void wait(What what, Arrived arrived, std::int64_t spare = 0);
  /// Returns whether a wait that began at `begin` has lasted too long.
  bool is_late(Clock::time_point begin) const;
  /// Says to the others that this rank has failed. The caller then throws an error after which the Engine may live on.
  void note_failed() { entries_[rank()].state.store(kFailed); }
  /// Returns a text such as "rank 2 (pid 4711)".
  std::string name_of(int rank) const;
  /// Throws tessera::Error (75) where a rank has failed or its process is gone. It looks at most every 50 ms.
  void look();
  /// REQUIRES: a rank has ended or is about to. It looks for that rank for a second, and throws as `look` does if it
  /// finds one.
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
