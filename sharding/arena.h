#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/comm/collectives.h"

namespace tessera {

/// One block of memory for one category of the plan, handed out from front to back and given back only as a whole. The
/// engine makes it once, when it sets itself up; the memory lives as long as the arena. Invariant: the pieces taken
/// fill the block exactly by the time the engine has set itself up (`expect_full`), so what is allocated *is* what was
/// planned.
class Arena {
 public:
  Arena() = default;
  /// Private zero-filled memory of `bytes` bytes: on the CPU of this process, on huge pages where the kernel grants
  /// them; on a GPU from LibTorch's allocator, which throws c10::OutOfMemoryError.
  static Arena plain(std::string name, std::int64_t bytes, c10::Device device = c10::Device(c10::kCPU));
  /// Memory that `group`'s transport reads and writes without copies. The call is collective.
  static Arena shared(std::string name, std::int64_t bytes, Collectives& group);
  /// One memory for all ranks of `group`, which must share memory. The call is collective.
  static Arena common(std::string name, std::int64_t bytes, Collectives& group);
  /// Makes this rank's `bytes` of a memory for all ranks; the parts of the ranks lie in it in rank order. So rank q's
  /// memory is `(q - rank) * bytes` behind this rank's. The call is collective; every rank gives the same `bytes`.
  static Arena part_of_common(std::string name, std::int64_t bytes, Collectives& group);
  /// Makes an arena of `memory`, which has `bytes` zeros and was allocated elsewhere, such as pinned memory of a GPU's
  /// host.
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
