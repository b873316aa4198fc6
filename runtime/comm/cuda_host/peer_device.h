#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "tessera/dtype.h"

namespace tessera {

/// A GPU that ranks in several processes use at once. Each rank has its own PeerDevice, with memory and events that the
/// other ranks can open, and with two queues of work. Work runs in order within its queue. One thread at a time uses an
/// object. Errors are those of CUDA, with exit code 70 unless the call says otherwise.
class PeerDevice {
 public:
  enum class Queue {
    kCompute,  ///< the queue of LibTorch's operators: the current stream
    kSide,     ///< this object's own stream
  };
  /// Plain bytes that a rank sends to the other ranks so that they can open its memory or event.
  struct Handle {
    std::array<std::byte, 64> bytes{};
    friend bool operator==(const Handle&, const Handle&) = default;
    friend auto operator<=>(const Handle&, const Handle&) = default;
  };
  /// A place in memory: an allocation, and a byte offset into it.
  struct Place {
    Handle allocation;
    std::uint64_t offset = 0;
  };
  class Event {
   public:
    virtual ~Event() = default;
  };

  virtual ~PeerDevice() = default;

  /// Returns the GPU's number among those of this machine.
  virtual int index() const = 0;

  /// Allocates zero-filled memory. It is freed with the last pointer to it, which must not outlive this object.
  virtual absl::StatusOr<std::shared_ptr<std::byte>> allocate(std::size_t bytes) = 0;
  /// Returns the place of `memory`, which may be any memory of this device, also memory that other code allocated.
  virtual absl::StatusOr<Place> locate(const void* memory) = 0;
  /// Opens a peer's memory. The pointer is valid until this object is destroyed.
  virtual absl::StatusOr<std::byte*> open(const Place& peers) = 0;

  virtual absl::StatusOr<std::unique_ptr<Event>> make_event(Handle& handle) = 0;
  virtual absl::StatusOr<std::unique_ptr<Event>> open_event(const Handle& peers) = 0;

  /// Queues a recording of the event: the event happens when everything before it in the queue is done.
  virtual absl::Status record(Queue queue, Event& event) = 0;
  /// Makes everything that follows in the queue wait for the event as it was last recorded.
  virtual absl::Status wait(Queue queue, Event& event) = 0;

  /// Blocks until everything in both queues is done.
  virtual absl::Status drain() = 0;
  /// Notes that the group failed. A peer for which queued work waits may be gone. The destructor then frees nothing,
  /// since freeing memory would wait for that work.
  virtual void abandon() = 0;

  virtual absl::Status copy(Queue queue, void* to, const void* from, std::size_t bytes) = 0;
  /// Queues pairwise_sum (pairwise_sum.h) of at most kMostInputs inputs into `output`, with the same bits.
  static constexpr std::size_t kMostInputs = 8;
  virtual absl::Status sum(Queue queue, std::span<const void* const> inputs, DType dtype, float* output,
                           std::size_t numel) = 0;
};

}  // namespace tessera
