#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/arithmetic/norm_tree.h"

namespace tessera {

// This is how a GPU adds up the nodes of the norm, for all buffers, in two launches. The nodes do not change from step
// to step, so tables say for each where its elements are and where its sum goes. The tables are plain data that host
// and kernels share.

/// A thread block adds up a tile: neighbouring nodes that have at most kNormTile blocks together.
constexpr std::uint32_t kNormTile = 256;
constexpr std::uint32_t kNormTileLevel = 8;

/// A node that has at most a tile's blocks.
struct NormTileNode {
  const float* values = nullptr;
  double* sum = nullptr;
  std::uint32_t numel = 0;
  std::uint32_t first_leaf = 0;  ///< index of its first block in the tile
};

/// A node that is larger than one tile. It has `tiles` tiles. All of them are full, except perhaps the tensor's last
/// tile.
struct NormSpan {
  double* tile_sums = nullptr;  ///< [tiles]; overwritten while they are added up
  double* sum = nullptr;
  std::uint64_t tiles = 0;
};

/// The tables as kernels get them; all pointers are to device memory.
struct NormTables {
  const NormTileNode* nodes = nullptr;        ///< ordered by tile
  const std::uint32_t* first_node = nullptr;  ///< it has tiles + 1 elements
  const NormSpan* spans = nullptr;            ///< it has span_count elements
  std::uint32_t tiles = 0, span_count = 0;
  std::ptrdiff_t shift = 0;  ///< offset in elements that is added to each node's address of its values
  // These are set if values are masters split in two (WeightFormat::kSplitBF16). `high` and `low` are the two halves of
  // the first master, and `at` is the address that nodes have for this master. Otherwise they are null.
  const std::uint16_t* high = nullptr;
  const std::int16_t* low = nullptr;
  const float* at = nullptr;
};

/// One buffer, aligned to 16 bytes, with the runs that it holds.
struct NormBuffer {
  const float* values = nullptr;
  std::vector<NormRun> runs;
};

/// The contents of NormTables in host memory, before they are copied to the device.
struct NormLaunch {
  std::vector<NormTileNode> nodes;
  std::vector<std::uint32_t> first_node = {0};
  std::vector<NormSpan> spans;
};

/// Returns the number of scratch values that are needed: one for each tile that is only a part of a node.
std::size_t norm_scratch_count(std::span<const NormBuffer> buffers);

/// Returns tables for adding up the nodes of all buffers, in order, into `sums`, which has as many numbers as the
/// NormSums of all buffers together (NormSums::count). `scratch` has norm_scratch_count numbers. The function does not
/// access the memory to which `sums` and `scratch` point.
NormLaunch norm_launch(std::span<const NormBuffer> buffers, double* sums, double* scratch);

}  // namespace tessera
