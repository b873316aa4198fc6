#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

/// Messages of numbers that are packed (lossless.h): how many bytes they have, and the packed numbers. A receiver cannot know how many those
/// are, and has memory for as many as there can be: Gloo takes a message that is shorter than its receiver's memory.

/// Memory of a message that is packed.
class PackBuffer {
 public:
  PackBuffer() = default;
  explicit PackBuffer(std::size_t bytes);
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  std::size_t capacity() const { return capacity_; }

 private:
  std::unique_ptr<std::byte[]> data_;
  std::size_t capacity_ = 0;
};

/// Those of a group that are not in use. Any thread calls.
class PackBuffers {
 public:
  PackBuffer take(std::size_t bytes);
  void give_back(PackBuffer buffer);

 private:
  std::mutex mutex_;
  std::vector<PackBuffer> free_;
};

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
