#include "runtime/comm/c10d/packing.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/comm/sum/lossless.h"

namespace tessera {
namespace {

struct Head {
  std::uint64_t bytes = 0;  ///< bytes of the message, this field included
};

}  // namespace

PackBuffer PackBuffers::take(std::size_t bytes) {
  {
    const MutexLock lock(mutex_);
    const auto found = std::ranges::find_if(free_, [&](const Memory& memory) { return memory.size >= bytes; });
    if (found != free_.end()) {
      PackBuffer buffer(*this, std::move(*found));
      free_.erase(found);
      return buffer;
    }
    if (!free_.empty()) free_.pop_back();  // a larger buffer replaces the removed one
  }
  return PackBuffer(*this, {std::make_unique_for_overwrite<std::byte[]>(bytes), bytes});
}

void PackBuffers::keep(Memory memory) {
  const MutexLock lock(mutex_);
  free_.push_back(std::move(memory));
}

bool is_packed(DType dtype, std::size_t bytes) { return bytes >= kLeastPackedBytes && can_pack(dtype); }

std::size_t most_message_bytes(DType dtype, std::size_t bytes) {
  return sizeof(Head) + most_packed_bytes(dtype, bytes / size_of(dtype));
}

PackBuffer packed_message(DType dtype, const void* numbers, std::size_t bytes, PackBuffers& buffers) {
  PackBuffer message = buffers.take(most_message_bytes(dtype, bytes));
  const Head head{sizeof(Head) + pack(dtype, numbers, bytes / size_of(dtype), message.data() + sizeof(Head))};
  std::memcpy(message.data(), &head, sizeof head);
  return message;
}

std::size_t bytes_of_message(const PackBuffer& message) {
  Head head;
  std::memcpy(&head, message.data(), sizeof head);
  return head.bytes;
}

void unpack_message(const PackBuffer& message, DType dtype, void* numbers, std::size_t bytes) {
  const std::size_t all = bytes_of_message(message), most = most_message_bytes(dtype, bytes);
  if (all >= sizeof(Head) && all <= most &&
      unpack(dtype, {message.data() + sizeof(Head), all - sizeof(Head)}, numbers, bytes / size_of(dtype)))
    return;
  throw std::runtime_error("a packed message of " + std::to_string(bytes) + " bytes of " + std::string(name_of(dtype)) +
                           " says that it has " + std::to_string(all) + " bytes, at most " + std::to_string(most) +
                           ", and is damaged");
}

}  // namespace tessera
