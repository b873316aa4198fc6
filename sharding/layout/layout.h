#pragma once

// See docs/glossary.md: flat group.

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// Returns the least multiple of `multiple` that is not below `value`.
constexpr std::int64_t rounded_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// A run of elements of a flat buffer.
struct Extent {
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::int64_t end() const { return offset + numel; }
  friend bool operator==(const Extent&, const Extent&) = default;
};

Extent intersect(Extent a, Extent b);  ///< numel is 0 if they do not overlap

/// Whether several tensors of less than a block may lie in one block.
enum class SmallTensors {
  kShareBlocks,
  kOwnBlocks,  ///< no: needed by data with one value for each block, such as the scales of 8-bit optimizer states
};

/// The places of a flat group's tensors in its flat buffer, and the places at which the buffer is cut into equal
/// shards. It consists of integers, which are the same on every rank; it has no memory and no dtype.
///
/// The buffer consists of blocks of kBlock elements. A tensor with at least a block of elements begins at a block. So
/// the tensor's own blocks of kBlock elements, counted from its start, are blocks of the buffer. The blocks are the
/// leaves of the gradient norm's trees (optim/grad_norm.h); there is one tree for each tensor.
///
/// Invariants:
///  1. Tensors lie in the order given and do not overlap.
///  2. A tensor of kBlock elements or more begins at a multiple of kBlock. A smaller one begins at a multiple of kAlign
///     and does not reach into a second block; with kOwnBlocks it begins a block, and is alone in it.
///  3. `numel() == parts() * shard_numel()`, and shard_numel() is a multiple of cut() and of `multiple`. No shard
///     boundary is inside a tensor's block. A boundary inside a large tensor is a multiple of kBlock away from the
///     tensor's start, and no boundary is inside a small tensor.
///  4. cut() is kBlock, or a smaller power of two into which each tensor fits. If cut() is smaller than kBlock, no
///     tensor reaches over a multiple of cut(), and shards need not be padded to whole blocks.
///  5. Offsets and cut() depend on the tensors alone, not on `parts`.
///  6. padding() is less than the sum of kBlock for each tensor that begins a block, max(kAlign, its numel) for each
///     other tensor, and cut() (or `multiple`, if that is more) for each part.
class Layout {
 public:
  static constexpr std::int64_t kAlign = 32;     ///< 128 bytes of fp32
  static constexpr std::int64_t kLeastCut = 64;  ///< a cache line, if an element has one byte
  static constexpr std::int64_t kBlock = 256;

  Layout() = default;
  /// Makes the layout of tensors with `numels` elements. The length of a shard is a multiple of `multiple`, a power of
  /// two.
  static Layout pack(std::span<const std::int64_t> numels, int parts, SmallTensors small = SmallTensors::kShareBlocks,
                     std::int64_t multiple = 1);

  int parts() const { return parts_; }
  std::int64_t numel() const { return parts_ * shard_numel_; }
  std::int64_t shard_numel() const { return shard_numel_; }
  std::int64_t cut() const { return cut_; }
  std::size_t size() const { return extents_.size(); }
  Extent extent(std::size_t tensor) const { return extents_[tensor]; }
  Extent shard(int part) const { return {part * shard_numel_, shard_numel_}; }
  /// Returns the elements that belong to no tensor, in order.
  std::span<const Extent> gaps() const { return gaps_; }
  /// Returns the number of elements in all gaps.
  std::int64_t padding() const;

 private:
  void find_gaps();

  int parts_ = 1;
  std::int64_t shard_numel_ = 0, cut_ = kBlock;
  std::vector<Extent> extents_, gaps_;
};

}  // namespace tessera
