#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "runtime/comm/collectives.h"
#include "runtime/comm/shared/control_block.h"

namespace tessera {

/// The difference between ranks on threads and ranks in processes: where the control blocks are, how a peer's buffer is
/// found, and whether a peer still lives. There is one per rank and group; `rank` counts within the group.
class SharedSpace {
 public:
  virtual ~SharedSpace() = default;

  virtual GroupBlock& group_block() = 0;
  virtual RankBlock& rank_block(int rank) = 0;
  /// Two mailboxes a rank, readable by all ranks. Small messages and unreachable buffers travel in them.
  virtual std::byte* mailbox(int rank, int parity) = 0;
  virtual std::size_t mailbox_bytes() const = 0;

  /// Returns how peers find [data, data + bytes) of this rank.
  virtual Location locate(const void* data, std::size_t bytes) const = 0;
  /// Returns this rank's view of a peer's buffer; null if this rank has freed its part of the segment. REQUIRES:
  /// location.reachable().
  virtual std::byte* view(int peer, const Location& location) const = 0;

  /// Returns false once the peer can no longer answer. It may cost a system call.
  virtual bool alive(int peer) const = 0;
  /// Returns whether futexes must work between processes.
  virtual bool between_processes() const = 0;

  /// Memory for one CommBuffer. It is made in three steps, each collective. This rank's part is made (rank 0 makes all
  /// of common memory); all parts are made known by the caller, as `offers`, in rank order; and then they are opened.
  /// `publish` returns this rank's offer, which is valid as long as the Allocation.
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
