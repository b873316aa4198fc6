#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "offload/files/aligned_memory.h"

namespace tessera {

/// An array of a fixed number of plain values. All its bytes are zero at first. Its memory is counted like the memory
/// of records.
template <typename T>
class Table {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  Table() = default;

  /// Errors: 71 if there is no memory; the message begins with `who`.
  static absl::StatusOr<Table> make(std::size_t size, const std::string& who) {
    absl::StatusOr<AlignedMemory> memory = AlignedMemory::make(size * sizeof(T), who);
    if (!memory.ok()) return memory.status();
    Table table;
    table.memory_ = *std::move(memory);
    table.size_ = size;
    return table;
  }
  /// Returns the number of bytes that `make(size)` allocates.
  static constexpr std::size_t occupied_bytes(std::size_t size) {
    return AlignedMemory::occupied_bytes(size * sizeof(T));
  }

  std::size_t bytes() const { return memory_.bytes(); }
  std::span<T> span() const { return {reinterpret_cast<T*>(memory_.data()), size_}; }
  T& operator[](std::size_t index) const { return span()[index]; }

 private:
  AlignedMemory memory_;
  std::size_t size_ = 0;
};

}  // namespace tessera
