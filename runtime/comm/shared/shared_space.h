#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <memory>
#include <span>

#include "runtime/comm/collectives.h"
#include "runtime/comm/shared/control_block.h"

namespace tessera {

/// The differences between ranks that are threads and ranks that are processes: the place of the control blocks, the
/// way to find a peer's buffer, and the way to see whether a peer is still alive. There is one SharedSpace for each
/// rank and group. `rank` counts within the group.
class SharedSpace {
 public:
  virtual ~SharedSpace() = default;

  virtual GroupBlock& group_block() = 0;
  virtual RankBlock& rank_block(int rank) = 0;
  /// Each rank has two mailboxes, which all ranks can read. Small messages and unreachable buffers travel in them.
  virtual std::byte* mailbox(int rank, int parity) = 0;
  virtual std::size_t mailbox_bytes() const = 0;

  /// Returns the place of [data, data + bytes) of this rank in a form in which peers can find it.
  virtual Location locate(const void* data, std::size_t bytes) const = 0;
  /// Returns this rank's view of a peer's buffer. It is null if this rank has freed its part of the segment. REQUIRES:
  /// location.reachable().
  virtual std::byte* view(int peer, const Location& location) const = 0;

  /// Returns false if the peer has ended and so cannot answer any more. The call may cost a system call.
  virtual bool alive(int peer) const = 0;
  /// Returns whether futexes must work between processes.
  virtual bool between_processes() const = 0;

  /// Memory for one CommBuffer. It is made in three steps, each collective. First, this rank's part is made (rank 0
  /// makes all of common memory). Second, the caller makes all parts known, as `offers`, in rank order. Third, the
  /// parts are opened. `publish` returns this rank's offer, which is valid as long as the Allocation exists.
  class Allocation {
   public:
    virtual ~Allocation() = default;
    virtual Location publish() = 0;
    virtual absl::StatusOr<std::unique_ptr<CommBuffer>> open(std::span<const Location> offers) = 0;
  };
  virtual absl::StatusOr<std::unique_ptr<Allocation>> allocate(std::size_t bytes) = 0;
  virtual absl::StatusOr<std::unique_ptr<Allocation>> allocate_common(std::size_t bytes) = 0;
};

}  // namespace tessera
