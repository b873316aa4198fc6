#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/comm/collectives.h"

namespace tessera {

/// One block of memory for one category of the plan. Pieces are taken from front to back, and the block is freed only
/// as a whole. The engine makes the plan's arenas once, during its set-up; the memory lives as long as the arena.
/// (Memory beyond the plan has separate arenas, which are made during a step.) Invariant: at the end of the set-up the
/// taken pieces fill the block exactly (`expect_full`), so the allocated bytes *are* the planned bytes.
class Arena {
 public:
  Arena() = default;
  /// Makes an arena of `bytes` bytes of private memory, filled with zeros. On the CPU the memory lies on huge pages if
  /// the kernel grants them. On a GPU it comes from LibTorch's allocator, which throws c10::OutOfMemoryError.
  static Arena plain(std::string name, std::int64_t bytes, c10::Device device = c10::Device(c10::kCPU));
  /// Makes an arena in memory that the transport of `group` reads and writes without copies. The call is collective.
  static Arena shared(std::string name, std::int64_t bytes, Collectives& group);
  /// Makes one arena for all ranks of `group`, which must share memory. The call is collective.
  static Arena common(std::string name, std::int64_t bytes, Collectives& group);
  /// Makes one block of memory for all ranks, in which the parts of the ranks lie in rank order. The result is this
  /// rank's part, which has `bytes` bytes. So the part of rank q begins `(q - rank) * bytes` bytes after the part of
  /// this rank. The call is collective, and every rank gives the same `bytes`.
  static Arena part_of_common(std::string name, std::int64_t bytes, Collectives& group);
  /// Makes an arena in `memory`, which was allocated elsewhere, such as pinned memory of a GPU's host. `memory` has
  /// `bytes` bytes, which are zeros.
  static Arena given(std::string name, std::int64_t bytes, std::shared_ptr<std::byte> memory);

  /// Returns the next `bytes` bytes. Pieces are whole cache lines (layouts are multiples of 64 elements), so each piece
  /// begins on a cache line.
  std::byte* take(std::int64_t bytes);
  std::byte* data() const { return memory_.get(); }
  std::int64_t bytes() const { return bytes_; }
  std::int64_t taken() const { return taken_; }
  /// Throws an error unless all bytes are taken.
  void expect_full() const;

 private:
  static Arena mapped(Arena arena);
  static Arena on_device(Arena arena, c10::Device device);
  static Arena over(std::string name, std::int64_t bytes, absl::StatusOr<std::unique_ptr<CommBuffer>> buffer);

  std::string name_;
  std::shared_ptr<std::byte> memory_;
  std::int64_t bytes_ = 0, taken_ = 0;
};

}  // namespace tessera
