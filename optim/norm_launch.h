#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/arithmetic/norm_tree.h"

namespace tessera {

// A GPU adds up the nodes of the norm, for all buffers, in two launches. The nodes do not change from step to step, so
// tables give, for each node, the addresses of its elements and of its sum. The tables are plain data that host and
// kernels share.

/// The largest number of blocks of a tile. A tile is a list of neighbouring nodes, which one thread block adds up.
constexpr std::uint32_t kNormTile = 256;
constexpr std::uint32_t kNormTileLevel = 8;

/// A node that has at most as many blocks as a tile.
struct NormTileNode {
  const float* values = nullptr;
  double* sum = nullptr;
  std::uint32_t numel = 0;
  std::uint32_t first_leaf = 0;  ///< index of the node's first block in the tile
};

/// A node that is larger than one tile. It has `tiles` tiles. All tiles are full, except perhaps the last tile of the
/// tensor.
struct NormSpan {
  double* tile_sums = nullptr;  ///< [tiles]; the sums are overwritten while they are added up
  double* sum = nullptr;
  std::uint64_t tiles = 0;
};

/// The tables in the form that kernels get; all pointers point to device memory.
struct NormTables {
  const NormTileNode* nodes = nullptr;        ///< ordered by tile
  const std::uint32_t* first_node = nullptr;  ///< [tiles + 1]: index of each tile's first node
  const NormSpan* spans = nullptr;            ///< [span_count]
  std::uint32_t tiles = 0, span_count = 0;
  std::ptrdiff_t shift = 0;  ///< number of elements that is added to the address of each node's values
  // The next three members are set if values are masters split in two (WeightFormat::kSplitBF16). `high` and `low` are
  // the addresses of the first master's two halves, and `at` is the address that nodes have for this master. Otherwise
  // these three members are null.
  const std::uint16_t* high = nullptr;
  const std::int16_t* low = nullptr;
  const float* at = nullptr;
};

/// A buffer, aligned to 16 bytes, with the runs that it holds.
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
