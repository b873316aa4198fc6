#pragma once

// See docs/glossary.md: carried.

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

// This file defines the tree by which a tensor's squared norm is added up (see grad_norm.h). The CPU and the kernels
// share this code.
//
// The tensor is cut into blocks of 256 elements, counted from its own start; the last block may be shorter. Blocks are
// the leaves of a binary tree over block numbers. The node with level l and number i is the sum over the blocks [i *
// 2^l, (i + 1) * 2^l). This sum is the sum of the left child plus the sum of the right child. A node whose sibling lies
// behind the tensor's end is carried up unchanged. So the operands of every addition depend only on the tensor's
// elements and their number.

constexpr std::uint64_t kNormBlock = 256;  ///< number of elements in a block

TESSERA_ALWAYS_INLINE constexpr std::uint64_t norm_blocks_of(std::uint64_t numel) {
  return (numel + kNormBlock - 1) / kNormBlock;
}

/// The part of one tensor that lies in a rank's part of a flat buffer. It begins and ends at a block boundary of the
/// tensor.
struct NormRun {
  std::uint64_t begin = 0;        ///< first element, counted from the beginning of the part
  std::uint64_t numel = 0;        ///< number of elements, above 0
  std::uint64_t first_block = 0;  ///< number, within the tensor, of the run's first block
  std::uint32_t tensor = 0;       ///< number of the tensor; its other runs have the same number
  bool is_last = true;            ///< whether the run has the tensor's last block

  std::uint64_t blocks() const { return norm_blocks_of(numel); }
};

/// Calls `visit(level, index)` for the largest nodes whose blocks are all in the run, in block order. A whole tensor
/// has one such node. A part of a tensor has at least 1 and at most 2 * ceil(log2(blocks of the tensor)) such nodes.
template <class Visit>
void for_each_norm_node(const NormRun& run, const Visit& visit) {
  const std::uint64_t end = run.first_block + run.blocks();
  for (std::uint64_t block = run.first_block; block < end;) {
    std::uint32_t level = 0;
    const auto has_parent = [&] {
      const std::uint64_t parent_end = block + (std::uint64_t{2} << level);
      const bool is_there = parent_end <= end || (run.is_last && parent_end - end < std::uint64_t{1} << level);
      return (block >> level) % 2 == 0 && is_there;
    };
    while (has_parent()) ++level;
    visit(level, block >> level);
    block += std::uint64_t{1} << level;
  }
}

/// One node that a rank sends, with its place in the tree of its tensor.
struct NormLink {
  std::uint32_t part = 0;    ///< index of the part whose rank sends the node's sum
  std::uint32_t slot = 0;    ///< index among the sums that the part sends
  std::uint32_t merges = 0;  ///< number of larger nodes that this node completes: its parent, its grandparent and so on
};

/// Returns the sum over a tensor with the nodes `links[0, count)`, which must be all of its nodes, in block order.
/// `sum_of(link)` is the node's sum. `stack` has space for kMostNormLevels numbers.
constexpr std::size_t kMostNormLevels = 64;
template <class SumOf>
TESSERA_ALWAYS_INLINE double add_up_nodes(const NormLink* links, std::size_t count, double* stack,
                                          const SumOf& sum_of) {
  std::size_t depth = 0;
  for (std::size_t i = 0; i < count; ++i) {
    double sum = sum_of(links[i]);
    for (std::uint32_t merge = 0; merge < links[i].merges; ++merge) sum = stack[--depth] + sum;
    stack[depth++] = sum;
  }
  // The remaining nodes have no siblings. They are subtrees, each with a lower level than the node before it.
  double total = 0.0;
  for (std::size_t i = depth; i-- > 0;) total = i + 1 == depth ? stack[i] : stack[i] + total;
  return total;
}

}  // namespace tessera
