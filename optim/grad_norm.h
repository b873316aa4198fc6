#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "optim/instruction_set.h"
#include "optim/norm_node.h"

namespace tessera {

/// The squared 2-norm of a unit's gradient in fp64, independent of how the unit is cut into shards, bit for bit.
///
/// The unit's flat buffer is cut into blocks of 256 elements, counted from its start. A block's sum runs over 16
/// lanes (element i goes to lane i mod 16), added in a fixed order; squares of fp32 numbers are exact in fp64. Blocks
/// are combined by the binary tree over block indices: a node's sum is the sum of its left child plus that of its
/// right one, and a child whose sibling lies beyond the end is carried up as it is. Every addition thus has operands
/// that depend on the unit alone.
///
/// A shard of whole blocks holds some subtrees completely. It hands out the roots of the largest of those, at most
/// max_nodes(), whatever its size; adding what lies above them is left to combine(), which every rank does alike.
/// If an element is infinite or NaN, so is the total: `std::isfinite(total)` is the overflow check.
class NormTree {
 public:
  static constexpr std::size_t kBlockNumel = 256;

  explicit NormTree(std::uint64_t total_blocks, InstructionSet set = best_instruction_set());

  /// Blocks that a flat buffer of `numel` elements has; its last one may be partial.
  static std::uint64_t blocks_of(std::uint64_t numel) { return (numel + kBlockNumel - 1) / kBlockNumel; }

  std::uint64_t total_blocks() const { return total_blocks_; }

  /// The most nodes that one shard can append: 2 * ceil(log2(total_blocks)), at least 1.
  std::size_t max_nodes() const;

  /// Appends the nodes of the shard that begins at block `first_block`, in block order, and clears `finite` if an
  /// element is infinite or NaN. The shard's length is a multiple of 256, unless it ends in the unit's last block.
  /// Throws `std::invalid_argument` where the shard is not within the unit or ends inside another block.
  void partial(std::span<const float> shard, std::uint64_t first_block, std::vector<NormNode>& out, bool& finite) const;

  /// The total from the nodes of all shards, in any order, absent ones skipped. An error (exit code 70) if they do not
  /// cover every block exactly once: a rank's nodes are missing, or there twice.
  absl::StatusOr<double> combine(std::span<const NormNode> nodes) const;
  /// The same with memory that is kept from call to call: allocates only until `scratch` has room for all nodes.
  absl::StatusOr<double> combine(std::span<const NormNode> nodes, std::vector<NormNode>& scratch) const;

  /// partial() for a shard that becomes final piece by piece, as in a reduction.
  class Builder;

 private:
  std::uint64_t total_blocks_;
  double (*block_sum_)(const float* block, std::size_t numel);
};

/// Takes a shard's elements in order and keeps the nodes of what it has seen; the same bits as partial() gives for the
/// whole, wherever the pieces are cut. Allocates when constructed and never again. For one thread at a time.
///
///   builder.reset(first_block);  builder.add(piece); ...  builder.nodes(), builder.finite()
class NormTree::Builder {
 public:
  explicit Builder(const NormTree& tree);

  /// Begins a shard at block `first_block`.
  void reset(std::uint64_t first_block);
  /// The elements after those added so far: a multiple of 256, unless they end in the unit's last block. Throws
  /// `std::invalid_argument` as partial() does.
  void add(std::span<const float> piece);

  /// In block order, at most max_nodes(). Valid until the next add() or reset().
  std::span<const NormNode> nodes() const { return {stack_.data(), depth_}; }
  /// Whether all elements since reset() were finite.
  bool finite() const;

 private:
  NormTree tree_;
  std::uint64_t next_block_ = 0;
  std::vector<NormNode> stack_;  // [max_nodes], the first depth_ in use
  std::size_t depth_ = 0;
};

}  // namespace tessera
