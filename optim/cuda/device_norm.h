#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "optim/norm_node.h"

namespace tessera::cuda {

/// Where a shard's blocks lie among the tiles that thread blocks add up: dyadic runs of 256. What is not a whole tile,
/// before the first and behind the last, is added block by block.
struct NormTiles {
  static constexpr std::uint64_t kBlocks = 256;

  std::uint64_t first_block = 0, end_block = 0;  ///< of the shard, in the unit
  std::uint64_t first_tile = 0, end_tile = 0;    ///< whole tiles; the same number twice if there is none
  std::uint64_t first_super = 0, end_super = 0;  ///< whole dyadic runs of 256 tiles

  NormTiles(std::uint64_t first_block, std::uint64_t blocks);
  std::uint64_t tiles() const { return end_tile - first_tile; }
  std::uint64_t supers() const { return end_super - first_super; }
};

/// Bytes of device scratch for shards of up to `numel` elements.
std::size_t norm_scratch_bytes(std::uint64_t numel);

/// NormTree::partial (grad_norm.h) on the GPU: writes the nodes of a shard of whole blocks of 256 elements (but for the
/// unit's last), which begins at block `first_block` of its unit, to `nodes` [max_nodes], filled up with absent ones.
/// One pass over the shard at the speed of its memory, and two small launches. The same bits as on the CPU.
/// `shard` is aligned to 16 bytes; `nodes` and `scratch` are device memory.
cudaError_t norm_nodes(const float* shard, std::uint64_t numel, std::uint64_t first_block, NormNode* nodes,
                       std::size_t max_nodes, void* scratch, cudaStream_t stream);

/// NormTree::combine for each of `groups` groups, whose nodes from all ranks lie in block order, one group behind the
/// other from `first_node[g]` to `first_node[g + 1]`; then the sum over groups in order, into `sum_of_squares` [1].
/// Nodes that do not cover a group once each make it NaN. All arrays are device memory; `scratch` has room for as many
/// nodes as `nodes`.
cudaError_t combine_norm(const NormNode* nodes, const std::uint32_t* first_node, const std::uint64_t* group_blocks,
                         int groups, NormNode* scratch, double* group_sums, double* sum_of_squares,
                         cudaStream_t stream);

}  // namespace tessera::cuda
