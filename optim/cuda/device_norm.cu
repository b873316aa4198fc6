#include <math.h>

#include <algorithm>

#include "optim/cuda/device_norm.h"
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

/// Fewer than 512 blocks at an end of the shard: a sum each.
struct Edge {
  std::uint64_t begin = 0;  ///< elements into the shard
  unsigned blocks = 0;
  double* sums = nullptr;
};

/// Blocks that a thread block takes of an edge: one for each of its groups of lanes.
constexpr unsigned kEdgeBlocks = kNormThreads / kLanes;

__host__ __device__ constexpr unsigned thread_blocks_of(unsigned edge_blocks) {
  return (edge_blocks + kEdgeBlocks - 1) / kEdgeBlocks;
}

/// One pass over the shard: a thread block for each tile, for its 256 blocks' sum; then those of the head and the tail.
struct ShardPass {
  const float* shard;
  std::uint64_t numel, tiles_begin;  ///< elements
  unsigned tiles;
  double* tile_sums;
  Edge head, tail;
};

__device__ void sum_tile(const ShardPass& pass, unsigned tile) {
  __shared__ double sums[kTile];
  const std::uint64_t tile_begin = pass.tiles_begin + std::uint64_t{tile} * kTile * kBlockNumel;
  for (unsigned block = threadIdx.x / kLanes; block < kTile; block += kEdgeBlocks) {
    const std::uint64_t begin = tile_begin + block * kBlockNumel;
    const double sum = block_sum(pass.shard + begin, pass.numel - begin);
    if (threadIdx.x % kLanes == 0) sums[block] = sum;
  }
  add_tree(sums);
  if (threadIdx.x == 0) pass.tile_sums[tile] = sums[0];
}

__device__ void sum_edge(const ShardPass& pass, const Edge& edge, unsigned part) {
  const unsigned block = part * kEdgeBlocks + threadIdx.x / kLanes;
  const std::uint64_t begin = edge.begin + std::uint64_t{block} * kBlockNumel;
  const bool is_there = block < edge.blocks;
  const double sum = block_sum(pass.shard + (is_there ? begin : 0), is_there ? pass.numel - begin : 0);
  if (is_there && threadIdx.x % kLanes == 0) edge.sums[block] = sum;
}

__global__ void __launch_bounds__(kNormThreads) sum_shard(ShardPass pass) {
  const unsigned head = thread_blocks_of(pass.head.blocks);
  if (blockIdx.x < pass.tiles) return sum_tile(pass, blockIdx.x);
  const unsigned part = blockIdx.x - pass.tiles;
  part < head ? sum_edge(pass, pass.head, part) : sum_edge(pass, pass.tail, part - head);
}

/// A thread block 256 tiles.
__global__ void sum_supers(const double* tile_sums, double* super_sums) {
  __shared__ double sums[kTile];
  sums[threadIdx.x] = tile_sums[std::uint64_t{blockIdx.x} * kTile + threadIdx.x];
  add_tree(sums);
  if (threadIdx.x == 0) super_sums[blockIdx.x] = sums[0];
}

/// Sums of nodes of one level, neighbours in block order: of a shard's edge (fewer than 512), or of its supers.
struct Sums {
  const double* sums;
  std::uint64_t first_index, count;
  std::uint32_t level;
};
struct SumsInOrder {
  static constexpr int kParts = 5;
  Sums parts[kParts];
};

constexpr unsigned kMostAtEdge = 2 * kTile;
constexpr unsigned kMostNodes = 160;  // a stack holds two of each of 64 levels at most

/// The roots of the largest subtrees of `part`, in order, onto the stack of thread 0.
__device__ std::size_t merge_edge(const Sums& part, double* sums, NormNode* stack, std::size_t depth) {
  const auto count = static_cast<unsigned>(part.count);
  __syncthreads();  // the part before has been read
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) sums[i] = part.sums[i];
  // Where both of two siblings are there, the left one's place becomes their parent's.
  for (unsigned step = 1; step < count; step *= 2) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i + 2 * step <= count; i += blockDim.x) {
      if ((part.first_index + i) % (2 * step) == 0) sums[i] += sums[i + step];
    }
  }
  __syncthreads();
  if (threadIdx.x > 0) return depth;
  for (unsigned i = 0; i < count;) {
    unsigned level = 0;
    while (((part.first_index + i) >> level) % 2 == 0 && i + (2u << level) <= count) ++level;
    depth = push_and_merge(stack, depth, {part.level + level, 0, (part.first_index + i) >> level, sums[i]});
    i += 1u << level;
  }
  return depth;
}

/// One thread block.
__global__ void __launch_bounds__(kTile) merge(SumsInOrder ordered, NormNode* nodes, std::size_t max_nodes) {
  __shared__ double sums[kMostAtEdge];
  __shared__ double stack_memory[kMostNodes * sizeof(NormNode) / sizeof(double)];
  auto* const stack = reinterpret_cast<NormNode*>(stack_memory);
  std::size_t depth = 0;
  for (const Sums& part : ordered.parts) {
    if (part.level < kSuperLevel) {
      depth = merge_edge(part, sums, stack, depth);
    } else if (threadIdx.x == 0) {
      for (std::uint64_t i = 0; i < part.count; ++i) {
        depth = push_and_merge(stack, depth, {part.level, 0, part.first_index + i, part.sums[i]});
      }
    }
  }
  if (threadIdx.x > 0) return;
  for (std::size_t i = 0; i < max_nodes; ++i) nodes[i] = i < depth ? stack[i] : NormNode{};
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
  const auto head = static_cast<unsigned>(head_end - first_block),
             tail = static_cast<unsigned>(t.end_block - tail_begin);
  const ShardPass pass{shard,
                       numel,
                       from_block(head_end),
                       static_cast<unsigned>(t.tiles()),
                       s.tiles,
                       {0, head, s.head_blocks},
                       {from_block(tail_begin), tail, s.tail_blocks}};
  const unsigned thread_blocks = pass.tiles + thread_blocks_of(head) + thread_blocks_of(tail);
  cudaError_t error = thread_blocks == 0 ? cudaSuccess : launch(sum_shard, thread_blocks, kNormThreads, stream, pass);
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
  return launch(merge, 1, kTile, stream, ordered, nodes, max_nodes);
}

cudaError_t combine_norm(const NormNode* nodes, const std::uint32_t* first_node, const std::uint64_t* group_blocks,
                         int groups, NormNode* scratch, double* group_sums, double* sum_of_squares,
                         cudaStream_t stream) {
  return launch(combine, 1, 256, stream, nodes, first_node, group_blocks, groups, scratch, group_sums, sum_of_squares);
}

}  // namespace tessera::cuda
