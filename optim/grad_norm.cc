#include "optim/grad_norm.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kAhead = 2 * NormTree::kBlockNumel;  // elements: shards are read once, in order

TESSERA_ALWAYS_INLINE double sum_lanes(double* lanes) {
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// The sum of squares of one block. A shorter last block counts as filled up with zeros: x + 0.0 == x, so the tail
// needs no order of its own.
TESSERA_ALWAYS_INLINE double block_sum(const float* block, std::size_t numel) {
  for (std::size_t line = 0; line < NormTree::kBlockNumel; line += kLanes) __builtin_prefetch(block + kAhead + line);
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double x = block[i + lane];
      lanes[lane] += x * x;
    }
  }
  for (std::size_t lane = 0; i + lane < numel; ++lane) {
    const double x = block[i + lane];
    lanes[lane] += x * x;
  }
  return sum_lanes(lanes);
}

double block_sum_portable(const float* block, std::size_t numel) { return block_sum(block, numel); }
TESSERA_TARGET_AVX2 double block_sum_avx2(const float* block, std::size_t numel) { return block_sum(block, numel); }
TESSERA_TARGET_AVX512 double block_sum_avx512(const float* block, std::size_t numel) { return block_sum(block, numel); }

using BlockSum = double (*)(const float*, std::size_t);
BlockSum block_sum_for(InstructionSet set) {
  switch (set) {
    case InstructionSet::kPortable:
      break;
    case InstructionSet::kAvx2:
      return block_sum_avx2;
    case InstructionSet::kAvx512:
      return block_sum_avx512;
  }
  return block_sum_portable;
}

// A level that no tree has, as in bytes that were never received, sorts last and then covers nothing.
std::uint64_t first_block_of(const NormNode& node) {
  return node.level < 64 ? node.index << node.level : std::numeric_limits<std::uint64_t>::max();
}

}  // namespace

NormTree::NormTree(std::uint64_t total_blocks, InstructionSet set)
    : total_blocks_(total_blocks), block_sum_(block_sum_for(set)) {}

std::size_t NormTree::max_nodes() const {
  return total_blocks_ < 2 ? 1 : 2 * static_cast<std::size_t>(std::bit_width(total_blocks_ - 1));
}

void NormTree::partial(std::span<const float> shard, std::uint64_t first_block, std::vector<NormNode>& out,
                       bool& finite) const {
  Builder builder(*this);
  builder.reset(first_block);
  builder.add(shard);
  out.insert(out.end(), builder.nodes().begin(), builder.nodes().end());
  finite = finite && builder.finite();
}

absl::StatusOr<double> NormTree::combine(std::span<const NormNode> nodes) const {
  std::vector<NormNode> scratch;
  return combine(nodes, scratch);
}

absl::StatusOr<double> NormTree::combine(std::span<const NormNode> nodes, std::vector<NormNode>& scratch) const {
  scratch.clear();
  std::copy_if(nodes.begin(), nodes.end(), std::back_inserter(scratch),
               [](const NormNode& node) { return node.level != NormNode::kAbsent; });
  std::sort(scratch.begin(), scratch.end(),
            [](const NormNode& a, const NormNode& b) { return first_block_of(a) < first_block_of(b); });

  NormNode* stack = scratch.data();  // grows over the nodes that have been read
  std::size_t depth = 0;
  std::uint64_t next_block = 0;
  bool gapless = true;
  for (std::size_t i = 0; i < scratch.size(); ++i) {
    const NormNode node = scratch[i];
    gapless = first_block_of(node) == next_block;
    if (!gapless) break;
    next_block += std::uint64_t{1} << node.level;
    depth = push_and_merge(stack, depth, node);
  }
  if (!gapless || next_block != total_blocks_) {
    return make_error(ExitCode::kInternal,
                      fmt::format("gradient norm: the ranks' sums must cover blocks 0 to {} once each, but block {} is "
                                  "missing or doubled",
                                  total_blocks_, next_block));
  }
  return total_of(stack, depth);
}

NormTree::Builder::Builder(const NormTree& tree) : tree_(tree), stack_(tree.max_nodes()) {}

void NormTree::Builder::reset(std::uint64_t first_block) {
  next_block_ = first_block;
  depth_ = 0;
}

void NormTree::Builder::add(std::span<const float> piece) {
  const std::uint64_t blocks = blocks_of(piece.size());
  const bool within = next_block_ <= tree_.total_blocks_ && blocks <= tree_.total_blocks_ - next_block_;
  const bool whole = piece.size() % kBlockNumel == 0 || next_block_ + blocks == tree_.total_blocks_;
  if (!within || !whole) {
    throw std::invalid_argument(
        fmt::format("NormTree: {} elements at block {} of {} must lie within the unit and be cut at multiples of {} "
                    "elements",
                    piece.size(), next_block_, tree_.total_blocks_, kBlockNumel));
  }
  for (std::uint64_t block = 0; block < blocks; ++block, ++next_block_) {
    const std::size_t begin = block * kBlockNumel;
    const double sum = tree_.block_sum_(piece.data() + begin, std::min(kBlockNumel, piece.size() - begin));
    depth_ = push_and_merge(stack_.data(), depth_, NormNode{.level = 0, .index = next_block_, .sum = sum});
  }
}

bool NormTree::Builder::finite() const {
  // A sum of squares of finite fp32 numbers cannot overflow fp64, and a non-finite square never vanishes from a sum.
  return std::all_of(nodes().begin(), nodes().end(), [](const NormNode& node) { return std::isfinite(node.sum); });
}

}  // namespace tessera
