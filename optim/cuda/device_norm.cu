#include <math.h>

#include "optim/arithmetic/rounding.h"
#include "optim/arithmetic/scalar_lane.h"
#include "optim/cuda/device_norm.h"
#include "runtime/base/cuda_launch.h"

namespace tessera::cuda {
namespace {

constexpr unsigned kLanes = 16;  // number of lanes over which a block's sum runs
constexpr unsigned kNormThreads = 512;
constexpr unsigned kAtOnce = kNormThreads / kLanes;  // number of blocks that a thread block handles at once

/// Reads values at the addresses in the nodes, moved by NormTables::shift.
struct ValuesInPlace {
  const float* block;
  __device__ ValuesInPlace(const NormTables& t, const float* at) : block(at + t.shift) {}
  __device__ float operator()(unsigned i) const { return block[i]; }
};

/// Reads split masters, whose halves lie in two places.
struct SplitMasters {
  const std::uint16_t* high;
  const std::int16_t* low;
  __device__ SplitMasters(const NormTables& t, const float* at)
      : high(t.high + (at - t.at)), low(t.low + (at - t.at)) {}
  __device__ float operator()(unsigned i) const {
    const auto low_bits = static_cast<std::uint32_t>(static_cast<std::int32_t>(low[i]));
    return ScalarLane::float_of(join_split<std::uint32_t>(high[i], low_bits));
  }
};

/// Returns the sum of squares of one block to the first of the 16 neighbouring threads that compute it. `left`: the
/// number of elements of the node, from the block's beginning on. The sum has the same bits as block_sum of
/// grad_norm.cc.
template <class Values>
__device__ double block_sum(const Values& block, unsigned left) {
  const unsigned lane = threadIdx.x % kLanes;
  float values[kNormBlock / kLanes];
#pragma unroll
  for (unsigned k = 0; k < kNormBlock / kLanes; ++k) {
    const unsigned i = k * kLanes + lane;
    values[k] = i < left ? block(i) : 0.0f;
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

/// The nodes of one tile.
struct Tile {
  const NormTileNode* nodes;
  unsigned count, leaves;

  __device__ static unsigned blocks_of(const NormTileNode& node) {
    return static_cast<unsigned>(norm_blocks_of(node.numel));
  }
  __device__ Tile(const NormTables& t, unsigned tile)
      : nodes(t.nodes + t.first_node[tile]), count(t.first_node[tile + 1] - t.first_node[tile]) {
    leaves = nodes[count - 1].first_leaf + blocks_of(nodes[count - 1]);
  }
  /// Returns the node to which a leaf belongs, which is the last node that begins at or before the leaf.
  __device__ const NormTileNode& node_of(unsigned leaf) const {
    unsigned low = 0, high = count;
    while (high - low > 1) {
      const unsigned middle = (low + high) / 2;
      (nodes[middle].first_leaf <= leaf ? low : high) = middle;
    }
    return nodes[low];
  }
};

/// Each thread block sums one tile.
template <class Values>
__global__ void __launch_bounds__(kNormThreads) sum_tiles(NormTables t) {
  __shared__ double sums[kNormTile];
  const Tile tile(t, blockIdx.x);
  for (unsigned first = 0; first < tile.leaves; first += kAtOnce) {
    // The last threads may have no block of the tile, but must still take part in the shuffles of their warp.
    const unsigned leaf = first + threadIdx.x / kLanes;
    const bool is_there = leaf < tile.leaves;
    const NormTileNode& node = tile.node_of(leaf);
    const unsigned begin = is_there ? (leaf - node.first_leaf) * static_cast<unsigned>(kNormBlock) : 0;
    const double sum = block_sum(Values(t, node.values + begin), is_there ? node.numel - begin : 0);
    if (is_there && threadIdx.x % kLanes == 0) sums[leaf] = sum;
  }
  // The blocks of each node are added up in the order of the tree, into the place of the node's first block.
  const unsigned leaf = threadIdx.x < tile.leaves ? threadIdx.x : 0;
  const NormTileNode& node = tile.node_of(leaf);
  const unsigned place = leaf - node.first_leaf, blocks = Tile::blocks_of(node);
  for (unsigned step = 1; step < tile.leaves; step *= 2) {
    __syncthreads();
    if (threadIdx.x < tile.leaves && place % (2 * step) == 0 && place + step < blocks) sums[leaf] += sums[leaf + step];
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < tile.count; i += kNormThreads) {
    *tile.nodes[i].sum = sums[tile.nodes[i].first_leaf];
  }
}

/// Each thread block sums one span.
__global__ void __launch_bounds__(kNormThreads) sum_spans(NormTables t) {
  const NormSpan span = t.spans[blockIdx.x];
  for (std::uint64_t step = 1; step < span.tiles; step *= 2) {
    for (std::uint64_t left = threadIdx.x * 2 * step; left + step < span.tiles; left += kNormThreads * 2 * step) {
      span.tile_sums[left] += span.tile_sums[left + step];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *span.sum = span.tile_sums[0];
}

/// One thread block runs this kernel; each thread handles a tensor at a time.
__global__ void add_up(StepTables t) {
  const StepNorms& n = t.norm;
  const StepMessages& m = t.messages;
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(n.tensors); i += blockDim.x) {
    const std::uint32_t first = n.first_link[i];
    n.squares[i] =
        add_up_nodes(n.links + first, n.first_link[i + 1] - first, n.link_scratch + first, [&](const NormLink& link) {
          return part_of_message<double>(m, n.part_ranks[link.part], m.sums_offset)[link.slot];
        });
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  double total = 0.0;
  for (int i = 0; i < n.tensors; ++i) total += n.squares[i];
  *n.sum_of_squares = total;
}

/// These types read gradients as fp32.
struct F32Values {
  using Element = float;
  __device__ static float value(float x) { return x; }
};
struct BF16Values {
  using Element = std::uint16_t;
  __device__ static float value(std::uint16_t x) { return ScalarLane::float_of(static_cast<std::uint32_t>(x) << 16); }
};
struct F16Values {
  using Element = std::uint16_t;
  __device__ static float value(std::uint16_t x) {
    const std::uint32_t exponent = x >> 10 & 31u, mantissa = x & 1023u;
    if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-24f;  // the sign has no effect on a square
    if (exponent == 31) return ScalarLane::float_of(0x7f800000u | mantissa << 13);
    return ScalarLane::float_of((exponent + 112) << 23 | mantissa << 13);
  }
};

/// 16 neighbouring threads add up the squares of each block of elements.
template <class Values>
__global__ void __launch_bounds__(kNormThreads) square_blocks(OwnPieces p) {
  // The last threads may have no block, but must still take part in the shuffles of their warp.
  const unsigned block = blockIdx.x * kAtOnce + threadIdx.x / kLanes;
  const bool is_there = block < p.blocks;
  unsigned i = 0;
  while (i + 1 < p.count && p.pieces[i + 1].first_block <= block) ++i;
  const auto* const values = static_cast<const typename Values::Element*>(p.pieces[i].values);
  const std::uint64_t begin = is_there ? (block - p.pieces[i].first_block) * kSquaredBlock : p.pieces[i].numel;
  const std::uint64_t left = p.pieces[i].numel - begin;
  const std::uint64_t count = left < kSquaredBlock ? left : kSquaredBlock;
  double sum = 0.0;
  for (std::uint64_t k = threadIdx.x % kLanes; k < count; k += kLanes) {
    const double x = Values::value(values[begin + k]);
    sum += x * x;
  }
  for (unsigned width = kLanes / 2; width > 0; width /= 2) sum += __shfl_down_sync(0xffffffffu, sum, width, kLanes);
  if (is_there && threadIdx.x % kLanes == 0) p.block_sums[block] = sum;
}

/// One thread block runs this kernel; each thread handles a piece.
__global__ void add_own(OwnPieces p) {
  __shared__ double sums[OwnPieces::kMost];
  const unsigned i = threadIdx.x;
  if (i < p.count) {
    const unsigned end = i + 1 < p.count ? p.pieces[i + 1].first_block : p.blocks;
    double sum = 0.0;
    for (unsigned block = p.pieces[i].first_block; block < end; ++block) sum += p.block_sums[block];
    sums[i] = sum;
  }
  __syncthreads();
  if (i > 0) return;
  double unit = p.begins ? 0.0 : *p.unit_sum;
  for (unsigned k = 0; k < p.count; ++k) unit += sums[k];
  *p.unit_sum = unit;
  if (!p.ends || unit == 0.0) return;
  *p.sum += *p.is_measured != 0 ? static_cast<double>(NAN) : unit;
  *p.is_measured = 1;
}

}  // namespace

cudaError_t own_squares(const OwnPieces& pieces, cudaStream_t stream) {
  if (pieces.count == 0) return cudaSuccess;
  void (*kernel)(OwnPieces) = square_blocks<F32Values>;
  if (pieces.dtype == DType::kBF16) kernel = square_blocks<BF16Values>;
  if (pieces.dtype == DType::kF16) kernel = square_blocks<F16Values>;
  if (pieces.blocks > 0) {
    const unsigned blocks = (pieces.blocks + kAtOnce - 1) / kAtOnce;
    if (const cudaError_t error = launch(kernel, blocks, kNormThreads, stream, pieces); error != cudaSuccess)
      return error;
  }
  return launch(add_own, 1, OwnPieces::kMost, stream, pieces);
}

cudaError_t norm_sums(const NormTables& tables, cudaStream_t stream) {
  if (tables.tiles == 0) return cudaSuccess;
  const auto kernel = tables.high != nullptr ? sum_tiles<SplitMasters> : sum_tiles<ValuesInPlace>;
  const cudaError_t error = launch(kernel, tables.tiles, kNormThreads, stream, tables);
  if (error != cudaSuccess || tables.span_count == 0) return error;
  return launch(sum_spans, tables.span_count, kNormThreads, stream, tables);
}

cudaError_t norm_totals(const StepTables& tables, cudaStream_t stream) {
  return launch(add_up, 1, 256, stream, tables);
}

}  // namespace tessera::cuda
