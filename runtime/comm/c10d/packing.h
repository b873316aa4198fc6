#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/base/mutex.h"
#include "tessera/dtype.h"

namespace tessera {

/// Messages of numbers that are losslessly packed (lossless.h). A message has its length in bytes, and the packed
/// numbers. A receiver cannot know that length, so it provides memory for the longest possible message. Gloo accepts a
/// message that is shorter than its receiver's memory.

/// A group's memory for packed messages. Any thread may use it. A PackBuffers must outlive the buffers that it gave.
class PackBuffers {
 public:
  struct Memory {
    std::unique_ptr<std::byte[]> bytes;
    std::size_t size = 0;
  };
  /// Memory for one message; its destructor gives the memory back for the next one.
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

  /// Returns a buffer of at least `bytes`; its content is undefined.
  Buffer take(std::size_t bytes);

 private:
  void keep(Memory memory);

  Mutex mutex_;
  std::vector<Memory> free_ ABSL_GUARDED_BY(mutex_);
};
using PackBuffer = PackBuffers::Buffer;

/// Shorter messages are sent unpacked: their time on the wire is shorter than the time for which ranks wait for each
/// other.
constexpr std::size_t kLeastPackedBytes = 64 << 10;

/// Returns whether messages of `bytes` bytes of numbers of `dtype` are packed.
bool is_packed(DType dtype, std::size_t bytes);

/// Returns the longest packed message, in bytes, for `bytes` bytes of numbers of `dtype`.
std::size_t most_message_bytes(DType dtype, std::size_t bytes);

/// Returns `numbers`, packed.
PackBuffer packed_message(DType dtype, const void* numbers, std::size_t bytes, PackBuffers& buffers);

/// Returns the length in bytes that is stored in the message's head.
std::size_t bytes_of_message(const PackBuffer& message);
/// Unpacks a message into `numbers`. Throws std::runtime_error unless `packed_message` made the message from `bytes`
/// bytes of numbers of `dtype`.
void unpack_message(const PackBuffer& message, DType dtype, void* numbers, std::size_t bytes);

}  // namespace tessera
