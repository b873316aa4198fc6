#include "optim/grad_norm.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>

#include "runtime/base/error.h"

namespace tessera {
namespace {

constexpr std::size_t kLanes = 16;
static_assert(sizeof(NormNode) == 24, "NormNode must have no padding: ranks exchange its bytes");

TESSERA_ALWAYS_INLINE double sum_lanes(double* lanes) {
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// The sum of squares of one block. A shorter last block counts as filled up with zeros: x + 0.0 == x, so the tail
// needs no order of its own.
TESSERA_ALWAYS_INLINE double block_sum(const float* block, std::size_t numel) {
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
TESSERA_TARGET_AVX512 double block_sum_avx512(const float* block, std::size_t numel) {
  return block_sum(block, numel);
}

using BlockSum = double (*)(const float*, std::size_t);
BlockSum block_sum_for(InstructionSet set) {
  switch (set) {
    case InstructionSet::kPortable: break;
    case InstructionSet::kAvx2: return block_sum_avx2;
    case InstructionSet::kAvx512: return block_sum_avx512;
  }
  return block_sum_portable;
}

bool is_left_sibling(const NormNode& left, const NormNode& right) {
  return left.level == right.level && left.index % 2 == 0 && left.index + 1 == right.index;
}

// Replaces two siblings at the stack's end by their parent, as often as there are two. `stack` holds nodes in block
// order from `base` on, no two of which are siblings: at most two of each level, like the digits of a counter.
void push_and_merge(std::vector<NormNode>& stack, std::size_t base, NormNode node) {
  while (stack.size() > base && is_left_sibling(stack.back(), node)) {
    node = NormNode{.level = node.level + 1, .index = node.index / 2, .sum = stack.back().sum + node.sum};
    stack.pop_back();
  }
  stack.push_back(node);
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
  const std::uint64_t blocks = blocks_of(shard.size());
  const bool within = first_block <= total_blocks_ && blocks <= total_blocks_ - first_block;
  const bool whole = shard.size() % kBlockNumel == 0 || first_block + blocks == total_blocks_;
  if (!within || !whole) {
    throw std::invalid_argument(
        fmt::format("NormTree: a shard of {} elements at block {} of {} must lie within the unit and be cut at "
                    "multiples of {} elements", shard.size(), first_block, total_blocks_, kBlockNumel));
  }
  const std::size_t base = out.size();
  for (std::uint64_t block = 0; block < blocks; ++block) {
    const std::size_t begin = block * kBlockNumel;
    const double sum = block_sum_(shard.data() + begin, std::min(kBlockNumel, shard.size() - begin));
    push_and_merge(out, base, NormNode{.level = 0, .index = first_block + block, .sum = sum});
  }
  // A sum of squares of finite fp32 numbers cannot overflow fp64, and a non-finite square never vanishes from a sum.
  for (std::size_t i = base; i < out.size(); ++i) finite = finite && std::isfinite(out[i].sum);
}

absl::StatusOr<double> NormTree::combine(std::span<const NormNode> nodes) const {
  std::vector<NormNode> sorted;
  sorted.reserve(nodes.size());
  std::copy_if(nodes.begin(), nodes.end(), std::back_inserter(sorted),
               [](const NormNode& node) { return node.level != NormNode::kAbsent; });
  std::sort(sorted.begin(), sorted.end(),
            [](const NormNode& a, const NormNode& b) { return first_block_of(a) < first_block_of(b); });

  std::vector<NormNode> stack;
  std::uint64_t next_block = 0;
  bool gapless = true;
  for (const NormNode& node : sorted) {
    gapless = first_block_of(node) == next_block;
    if (!gapless) break;
    next_block += std::uint64_t{1} << node.level;
    push_and_merge(stack, 0, node);
  }
  if (!gapless || next_block != total_blocks_) {
    return make_error(ExitCode::kInternal,
                      fmt::format("gradient norm: the ranks' sums must cover blocks 0 to {} once each, but block {} is "
                                  "missing or doubled", total_blocks_, next_block));
  }
  // What is left are subtrees of falling level: the unit's last ones have no sibling and are carried up to it.
  double total = 0.0;
  for (std::size_t i = stack.size(); i-- > 0;) total = i + 1 == stack.size() ? stack[i].sum : stack[i].sum + total;
  return total;
}

}  // namespace tessera
