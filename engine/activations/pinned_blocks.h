#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "engine/device/pinned_memory.h"
#include "offload/files/aligned_memory.h"
#include "optim/device_kernels.h"

namespace tessera {

/// Pinned memory of a host for values of any length. A block is taken as it is needed and used again for values that
/// are no larger, so a steady loop takes none. One thread at a time uses it.
class PinnedBlocks {
 public:
  /// A block of pinned memory, and its last copy in either direction (null where there was none).
  struct Block {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
    std::shared_ptr<DeviceKernels::Mark> last;
  };

  PinnedBlocks(DeviceKernels& kernels, int rank)
      : give_(pinned_memory_of(kernels, rank, "activations",
                               "a higher offload.activations.min, fewer samples a microbatch, or recomputation needs "
                               "less of it; so does the tier \"nvme\"")) {}

  /// Takes the smallest free block that is large enough, or a new one of `bytes` bytes. Its last copy may still be
  /// under way. Throws tessera::Error (71) if the host does not have that much pinned memory. REQUIRES: the kernels
  /// live.
  Block take(std::size_t bytes) {
    auto best = idle_.end();
    for (auto block = idle_.begin(); block != idle_.end(); ++block) {
      if (block->bytes < bytes) continue;
      if (best == idle_.end() || block->bytes < best->bytes) best = block;
    }
    if (best == idle_.end()) return {give_(bytes), bytes, nullptr};
    Block block = std::move(*best);
    idle_.erase(best);
    return block;
  }
  void give_back(Block block) { idle_.push_back(std::move(block)); }
  /// Waits for the copies of the blocks that are not in use, and frees their memory.
  void clear() {
    for (const Block& block : idle_) {
      if (block.last) block.last->wait();
    }
    idle_.clear();
  }

 private:
  const AlignedMemory::Give give_;
  std::vector<Block> idle_;
};

}  // namespace tessera
