#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/base/mutex.h"
#include "tessera/dtype.h"

namespace tessera {

/// Messages of numbers that are packed (lossless.h): how many bytes they have, and the packed numbers. A receiver cannot know how many those
/// are, and has memory for as many as there can be: Gloo takes a message that is shorter than its receiver's memory.

/// Memory of a group for messages that are packed. Any thread calls; it outlives what it gave.
class PackBuffers {
 public:
  struct Memory {
    std::unique_ptr<std::byte[]> bytes;
    std::size_t size = 0;
  };
  /// Its end keeps the memory for the next one.
  class Buffer {
   public:
    Buffer(PackBuffers& owner, Memory memory) : owner_(&owner), memory_(std::move(memory)) {}
    Buffer(Buffer&&) = default;
    ~Buffer() {
      if (memory_.bytes) owner_->keep(std::move(memory_));
    }
    std::byte* data() { return memory_.bytes.get(); }
    const std::byte* data() const { return memory_.bytes.get(); }

   private:
    PackBuffers* owner_;
    Memory memory_;
  };

  /// Of `bytes` or more; what it holds is undefined.
  Buffer take(std::size_t bytes);

 private:
  void keep(Memory memory);

  Mutex mutex_;
  std::vector<Memory> free_ ABSL_GUARDED_BY(mutex_);
};
using PackBuffer = PackBuffers::Buffer;

/// Messages of fewer bytes are sent as they are: they wait for each other longer than they are on the wire.
constexpr std::size_t kLeastPackedBytes = 64 << 10;

/// Whether messages of `bytes` bytes of numbers of `dtype` are packed.
bool is_packed(DType dtype, std::size_t bytes);

/// Of a message of `bytes` bytes of numbers.
std::size_t most_message_bytes(DType dtype, std::size_t bytes);

/// `numbers`, packed.
PackBuffer packed_message(DType dtype, const void* numbers, std::size_t bytes, PackBuffers& buffers);

/// Bytes of the message, as it says.
std::size_t bytes_of_message(const PackBuffer& message);
/// Throws std::runtime_error where that is not what `packed_message` made of `bytes` bytes of numbers of `dtype`.
void unpack_message(const PackBuffer& message, DType dtype, void* numbers, std::size_t bytes);

}  // namespace tessera
