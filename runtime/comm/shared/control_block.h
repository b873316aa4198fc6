#pragma once

// See docs/glossary.md: slot.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "runtime/comm/published_call.h"

namespace tessera {

// The memory that connects the ranks of a shared-memory group. All its bytes are zero before the first call.

/// The place of a rank's buffer, in numbers that its peers understand. The SharedSpace decides about the meaning of the
/// numbers.
struct Location {
  static constexpr std::uint64_t kCommon = std::uint64_t{1} << 63;  ///< bit of `segment` that marks common memory

  std::uint64_t segment = 0;  ///< 0: peers cannot reach the buffer
  std::uint64_t offset = 0;
  bool reachable() const { return segment != 0; }
  /// Returns whether the memory is common (Collectives::allocate_common). If it is common, equal locations of two ranks
  /// are the same memory.
  bool common() const { return (segment & kCommon) != 0; }
  bool operator==(const Location&) const = default;
};

/// One call as its rank publishes it.
struct CallDescriptor {
  CallSignature signature;
  Location input, output;
};

/// The words that a rank publishes with each phase that it enters. They lie in one cache line, so that one transfer
/// tells a peer everything. `phase` is written last. The other words are valid if the phase is the first of a call.
struct alignas(128) Arrival {
  std::atomic<std::uint64_t> phase;
  std::atomic<std::uint64_t> digest;  ///< digest of the call's signature
  std::atomic<std::uint64_t> input_segment, input_offset, output_segment, output_offset;
};

/// The state of a rank, and what calls of its peers do in this state:
///
/// | state    | set by                              | its peers' calls                        |
/// |----------|-------------------------------------|-----------------------------------------|
/// | kRunning | -                                   | wait for the rank                       |
/// | kFailing | the rank, while it writes `message` | wait a moment longer                    |
/// | kFailed  | the rank: abort() or an error       | fail with its message and exit code     |
/// | kLeft    | the rank: leave(), or its           | fail, if a call needs this rank         |
/// |          | Collectives is gone                 |                                         |
enum class RankState : std::uint32_t { kRunning, kFailing, kFailed, kLeft };

/// The kinds of barrier that a group has. Each kind has its own phases (Meeting).
enum class Lane : std::uint32_t {
  kCalls,     ///< calls that block; each has one phase or more
  kStarted,   ///< reductions under way: phase k is over when all ranks have started the k-th
  kFinished,  ///< phase k is over when all ranks have done their share of the k-th reduction
};
constexpr std::size_t kLanes = 3;

/// A rank's side of a lane. Phase k, and the call that it begins, are in entry k % slots of the arrays.
template <std::size_t slots>
struct LaneBlock {
  Arrival arrivals[slots];
  /// The calls as words, for error messages. Peers read them only when something is wrong.
  alignas(128) PublishedCall calls[slots];
};

/// One rank's part of the shared memory. Only this rank writes it, except for a failure's state and message, which
/// run_ranks may write too.
struct alignas(128) RankBlock {
  static constexpr std::size_t kMessageBytes = 1024;
  /// Number of entries for calls that block. Phase k of the lane kCalls is in entry k & 1, and uses the rank's mailbox
  /// k & 1 (SharedMemoryCollectives, invariant 2).
  static constexpr std::size_t kCallSlots = 2;
  /// Largest number of reductions under way at a time.
  static constexpr std::size_t kReductionSlots = 16;

  LaneBlock<kCallSlots> blocking;
  LaneBlock<kReductionSlots> started, finished;
  alignas(128) std::atomic<std::uint32_t> current;  ///< place of the latest call, for error messages: lane << 16 | slot
  std::atomic<std::uint32_t> accessing;             ///< 1 while this rank reads or writes its peers' buffers
  std::atomic<RankState> state;
  std::atomic<std::int64_t> process;  ///< pid, for error messages; 0 on threads
  std::uint32_t exit_code;            ///< exit code of the failure; valid once `state` is kFailed
  char message[kMessageBytes];
};

/// Words that change only when a rank sleeps, fails or leaves, so every core normally has a copy of this cache line.
struct alignas(128) GroupBlock {
  std::uint64_t token;                               ///< proves that a mapping is the right segment
  alignas(128) std::atomic<std::uint32_t> sleepers;  ///< number of ranks that sleep, or slept when they were killed
  std::atomic<std::uint32_t> bell;                   ///< wakes sleepers: the last rank has arrived, or an alarm came
  std::atomic<std::uint32_t> alarms;                 ///< number of ranks that failed or left
  std::atomic<std::uint32_t> failed;                 ///< 1 after a failure or `withdraw`: no access to peers may begin
  /// A rank that is about to give up waiting sets `doubt`. No arrival counts by itself then. The ranks vote on every
  /// phase, and the first vote on a phase decides. The vote sets `verdicts[lane]` to 2 * phase, plus 1 if the phase is
  /// over.
  std::atomic<std::uint32_t> doubt;
  std::atomic<std::uint64_t> verdicts[kLanes];
};

}  // namespace tessera
