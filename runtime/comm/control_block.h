#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "runtime/comm/call.h"

namespace tessera {

// The memory that the ranks of a shared-memory group meet in. All zero bytes is the state before the first
// call.

/// Where a rank's buffer lies, in words that its peers understand. What the numbers mean is the SharedSpace's
/// affair.
struct Location {
  static constexpr std::uint64_t kCommon = std::uint64_t{1} << 63;  ///< set in `segment` of common memory

  std::uint64_t segment = 0;  ///< 0: peers cannot reach it
  std::uint64_t offset = 0;
  bool reachable() const { return segment != 0; }
  /// The same bytes on every rank (Collectives::allocate_common): equal locations are one place.
  bool common() const { return (segment & kCommon) != 0; }
  bool operator==(const Location&) const = default;
};

/// One call as its rank publishes it.
struct CallDescriptor {
  CallSignature signature;
  Location input, output;
};

/// A CallDescriptor that may be read while it is written: word by word, so a late or early reader (who asks
/// what a missing rank was last doing) gets a mixture at worst.
class PublishedCall {
 public:
  void store(const CallDescriptor& call) {
    std::array<std::uint64_t, kWords> words;
    std::memcpy(words.data(), &call, sizeof call);
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
  }
  CallDescriptor load() const {
    std::array<std::uint64_t, kWords> words;
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    CallDescriptor call;
    std::memcpy(static_cast<void*>(&call), words.data(), sizeof call);
    call.signature.label.back() = 0;
    return call;
  }

 private:
  static constexpr std::size_t kWords = sizeof(CallDescriptor) / sizeof(std::uint64_t);
  std::array<std::atomic<std::uint64_t>, kWords> words_;
};

/// | state    | set by                              | its peers' calls                        |
/// |----------|-------------------------------------|-----------------------------------------|
/// | kRunning | -                                   | wait for it                             |
/// | kFailing | the rank, while it writes `message` | wait a moment longer                    |
/// | kFailed  | the rank: abort() or an error       | fail with its message and exit code     |
/// | kLeft    | the rank: its Collectives is gone   | fail, if they need it for a call        |
enum class RankState : std::uint32_t { kRunning, kFailing, kFailed, kLeft };

struct alignas(128) RankBlock {
  static constexpr std::size_t kMessageBytes = 1024;

  std::atomic<std::uint64_t> arrived;  ///< phases this rank has entered
  std::atomic<std::uint32_t> current;  ///< which of `calls` is the latest
  std::atomic<std::uint32_t> reading;  ///< 1 while this rank reads its peers' buffers
  std::atomic<RankState> state;
  std::atomic<std::int64_t> process;  ///< pid, for messages; 0 on threads
  std::uint32_t exit_code;            ///< of kFailed; valid once state says so
  char message[kMessageBytes];
  /// Call n is in calls[phase & 1], phase being that of its first meeting; see SharedMemoryCollectives,
  /// invariant 2.
  alignas(128) PublishedCall calls[2];
};

struct alignas(128) GroupBlock {
  std::uint64_t token;  ///< proves that a mapping is the one its maker meant
  /// Meetings. Whoever makes `arrivals` k * size decides that phase k is over, and says so in `generation`. A
  /// rank that fails sets kPoison first: then no phase is ever over again. So a phase succeeds on all ranks
  /// or on none.
  static constexpr std::uint64_t kPoison = std::uint64_t{1} << 63;
  alignas(128) std::atomic<std::uint64_t> arrivals;
  alignas(128) std::atomic<std::uint32_t> generation;
  std::atomic<std::uint32_t> sleepers;  ///< ranks that sleep on `generation`, or did when they were killed
  std::atomic<std::uint32_t> alarms;    ///< ranks that failed or left
};

}  // namespace tessera
