#include "optim/cuda/device_norm.h"

#include <math.h>

#include <algorithm>

#include "runtime/base/cuda_launch.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kBlockNumel = 256;  // NormTree::kBlockNumel
constexpr unsigned kLanes = 16;        // a block's sum runs over as many lanes
constexpr unsigned kNormThreads = 512;
constexpr unsigned kTile = NormTiles::kBlocks;
constexpr std::uint32_t kTileLevel = 8, kSuperLevel = 16;

/// The sum of squares of one block, made by 16 neighbouring threads; the first of them has it. `left` elements of the
/// shard begin at `block`. As block_sum in grad_norm.cc.
__device__ double block_sum(const float* block, std::uint64_t left) {
  const unsigned lane = threadIdx.x % kLanes;
  float values[kBlockNumel / kLanes];
#pragma unroll
  for (unsigned k = 0; k < kBlockNumel / kLanes; ++k) {
    const unsigned i = k * kLanes + lane;
    values[k] = i < left ? block[i] : 0.0f;
  }
  double sum = 0.0;
#pragma unroll
  for (float value : values) {
    const double x = value;
    sum += x * x;
  }
#pragma unroll
  for (unsigned width = kLanes / 2; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width, kLanes);
  return sum;
}

/// sums[0, 256) in shared memory become the sum of the tree over them, in sums[0].
__device__ void add_tree(double* sums) {
  for (unsigned step = 1; step < kTile; step *= 2) {
    __syncthreads();
    const unsigned left = threadIdx.x * 2 * step;
    if (left < kTile) sums[left] += sums[left + step];
  }
}

/// A thread block a tile: its 256 blocks of the shard, to one sum.
__global__ void __launch_bounds__(kNormThreads) sum_tiles(const float* shard, std::uint64_t numel, double* tile_sums) {
  __shared__ double sums[kTile];
  const std::uint64_t tile_begin = std::uint64_t{blockIdx.x} * kTile * kBlockNumel;
  for (unsigned block = threadIdx.x / kLanes; block < kTile; block += kNormThreads / kLanes) {
    const std::uint64_t begin = tile_begin + block * kBlockNumel;
    const double sum = block_sum(shard + begin, numel - begin);
    if (threadIdx.x % kLanes == 0) sums[block] = sum;
  }
  add_tree(sums);
  if (threadIdx.x == 0) tile_sums[blockIdx.x] = sums[0];
}

/// A thread block 256 tiles.
__global__ void sum_supers(const double* tile_sums, double* super_sums) {
  __shared__ double sums[kTile];
  sums[threadIdx.x] = tile_sums[std::uint64_t{blockIdx.x} * kTile + threadIdx.x];
  add_tree(sums);
  if (threadIdx.x == 0) super_sums[blockIdx.x] = sums[0];
}

/// Fewer than 256 blocks at an end of the shard: a sum each.
__global__ void __launch_bounds__(kNormThreads)
    sum_blocks(const float* shard, std::uint64_t numel, unsigned blocks, double* block_sums) {
  // An even number of blocks, for both halves of a warp go together.
  for (unsigned block = threadIdx.x / kLanes; block < (blocks + 1) / 2 * 2; block += kNormThreads / kLanes) {
    const std::uint64_t begin = std::uint64_t{block} * kBlockNumel;
    const double sum = block_sum(shard + begin, begin < numel ? numel - begin : 0);
    if (block < blocks && threadIdx.x % kLanes == 0) block_sums[block] = sum;
  }
}

/// What one thread merges in block order: `count` sums of nodes of one level.
struct Sums {
  const double* sums;
  std::uint64_t first_index, count;
  std::uint32_t level;
};
struct SumsInOrder {
  static constexpr int kParts = 5;
  Sums parts[kParts];
};

__global__ void merge(SumsInOrder ordered, NormNode* nodes, std::size_t max_nodes) {
  std::size_t depth = 0;
  for (const Sums& part : ordered.parts) {
    for (std::uint64_t i = 0; i < part.count; ++i) {
      depth = push_and_merge(nodes, depth, {part.level, 0, part.first_index + i, part.sums[i]});
    }
  }
  for (; depth < max_nodes; ++depth) nodes[depth] = NormNode{};
}

__global__ void combine(const NormNode* nodes, const std::uint32_t* first_node, const std::uint64_t* group_blocks,
                        int groups, NormNode* scratch, double* group_sums, double* sum_of_squares) {
  for (int g = static_cast<int>(threadIdx.x); g < groups; g += static_cast<int>(blockDim.x)) {
    NormNode* const stack = scratch + first_node[g];
    std::size_t depth = 0;
    std::uint64_t next_block = 0;
    bool gapless = true;
    for (std::uint32_t i = first_node[g]; i < first_node[g + 1]; ++i) {
      const NormNode node = nodes[i];
      if (node.level == NormNode::kAbsent) continue;
      gapless = gapless && node.level < 64 && node.index << node.level == next_block;
      if (!gapless) break;
      next_block += std::uint64_t{1} << node.level;
      depth = push_and_merge(stack, depth, node);
    }
    group_sums[g] = gapless && next_block == group_blocks[g] ? total_of(stack, depth) : nan("");
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  double total = 0.0;
  for (int g = 0; g < groups; ++g) total += group_sums[g];
  *sum_of_squares = total;
}

std::uint64_t up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit; }

/// Where sums of each kind lie in the scratch.
struct Scratch {
  double *head_blocks, *tail_blocks, *tiles, *supers;
  Scratch(void* memory, const NormTiles& t) {
    head_blocks = static_cast<double*>(memory);
    tail_blocks = head_blocks + kTile;
    tiles = tail_blocks + kTile;
    supers = tiles + t.tiles();
  }
};

}  // namespace

NormTiles::NormTiles(std::uint64_t first, std::uint64_t blocks) : first_block(first), end_block(first + blocks) {
  first_tile = up(first_block, kBlocks);
  end_tile = std::max(first_tile, end_block / kBlocks);
  first_super = up(first_tile, kBlocks);
  end_super = std::max(first_super, end_tile / kBlocks);
}

std::size_t norm_scratch_bytes(std::uint64_t numel) {
  const std::uint64_t tiles = up(numel, kBlockNumel) / kTile;
  return sizeof(double) * (2 * kTile + tiles + tiles / kTile);
}

cudaError_t norm_nodes(const float* shard, std::uint64_t numel, std::uint64_t first_block, NormNode* nodes,
                       std::size_t max_nodes, void* scratch, cudaStream_t stream) {
  const NormTiles t(first_block, up(numel, kBlockNumel));
  const Scratch s(scratch, t);
  const auto from_block = [&](std::uint64_t block) { return (block - first_block) * kBlockNumel; };
  // Without a whole tile, everything is at the head.
  const std::uint64_t head_end = t.tiles() > 0 ? t.first_tile * kTile : t.end_block;
  const std::uint64_t tail_begin = t.tiles() > 0 ? t.end_tile * kTile : t.end_block;
  const auto head = static_cast<unsigned>(head_end - first_block), tail = static_cast<unsigned>(t.end_block - tail_begin);
  const auto sum_edge = [&](std::uint64_t first, unsigned blocks, double* sums) {
    const std::uint64_t begin = from_block(first);
    return blocks == 0 ? cudaSuccess
                       : launch(sum_blocks, 1, kNormThreads, stream, shard + begin, numel - begin, blocks, sums);
  };
  cudaError_t error = sum_edge(first_block, head, s.head_blocks);
  if (error == cudaSuccess) error = sum_edge(tail_begin, tail, s.tail_blocks);
  if (error == cudaSuccess && t.tiles() > 0) {
    const std::uint64_t begin = from_block(t.first_tile * kTile);
    error = launch(sum_tiles, static_cast<unsigned>(t.tiles()), kNormThreads, stream, shard + begin, numel - begin, s.tiles);
  }
  const std::uint64_t super_begin = t.supers() > 0 ? t.first_super * kTile : t.end_tile;
  const std::uint64_t super_end = t.supers() > 0 ? t.end_super * kTile : t.end_tile;
  if (error == cudaSuccess && t.supers() > 0) {
    const double* from = s.tiles + (super_begin - t.first_tile);
    error = launch(sum_supers, static_cast<unsigned>(t.supers()), kTile, stream, from, s.supers);
  }
  if (error != cudaSuccess) return error;
  const SumsInOrder ordered{{{s.head_blocks, first_block, head, 0},
                             {s.tiles, t.first_tile, super_begin - t.first_tile, kTileLevel},
                             {s.supers, t.first_super, t.supers(), kSuperLevel},
                             {s.tiles + (super_end - t.first_tile), super_end, t.end_tile - super_end, kTileLevel},
                             {s.tail_blocks, tail_begin, tail, 0}}};
  return launch(merge, 1, 1, stream, ordered, nodes, max_nodes);
}

cudaError_t combine_norm(const NormNode* nodes, const std::uint32_t* first_node, const std::uint64_t* group_blocks,
                         int groups, NormNode* scratch, double* group_sums, double* sum_of_squares,
                         cudaStream_t stream) {
  return launch(combine, 1, 256, stream, nodes, first_node, group_blocks, groups, scratch, group_sums, sum_of_squares);
}

}  // namespace tessera::cuda
