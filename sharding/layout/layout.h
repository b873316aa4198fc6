#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

/// A run of elements of a flat buffer.
struct Extent {
  std::int64_t offset = 0;
  std::int64_t numel = 0;
  std::int64_t end() const { return offset + numel; }
  friend bool operator==(const Extent&, const Extent&) = default;
};

Extent intersect(Extent a, Extent b);  ///< numel 0 where they do not meet

/// One tensor to be laid out.
struct LayoutItem {
  std::int64_t numel = 0;
  /// Shard boundaries may cut the tensor only at multiples of `block` elements from its start: 1 anywhere, a row's
  /// length, a quantisation block's, or `numel` for never.
  std::int64_t block = 1;
};

/// Where each tensor of a flat group lies in its flat buffer, and where the buffer is cut into equal shards.
/// Integers only: no memory, no dtype. The same on every rank.
///
/// Invariants:
///  1. `numel() == parts() * shard_numel()`, and shard_numel() is a multiple of kQuantum, so that a shard begins on
///     a block of the gradient norm and of 8-bit optimizer states.
///  2. Tensors lie in the order given, do not overlap, and begin at multiples of `align` elements (kAlign: 128 bytes of
///  fp32). 3. With block 1 everywhere the offsets do not depend on `parts`.
///  4. No shard boundary cuts a block.
class Layout {
 public:
  static constexpr std::int64_t kAlign = 32;
  static constexpr std::int64_t kQuantum = 256;

  Layout() = default;
  /// The smallest shard found by placing the tensors greedily. Block constraints are met by moving tensors, not by
  /// padding every tensor to a common multiple of the block sizes (the usual way, which coprime rows blow up).
  /// `align`: a multiple of kAlign that divides kQuantum; tensors begin at multiples of it, so that blocks of so many
  /// elements belong to one tensor each.
  static Layout pack(std::span<const LayoutItem> items, int parts, std::int64_t align = kAlign);

  int parts() const { return parts_; }
  std::int64_t numel() const { return parts_ * shard_numel_; }
  std::int64_t shard_numel() const { return shard_numel_; }
  std::size_t size() const { return extents_.size(); }
  Extent extent(std::size_t item) const { return extents_[item]; }
  Extent shard(int part) const { return {part * shard_numel_, shard_numel_}; }
  /// Elements that belong to no tensor, in order: alignment, block padding, the tail.
  std::span<const Extent> gaps() const { return gaps_; }
  std::int64_t padding() const;

 private:
  void find_gaps();

  int parts_ = 1;
  std::int64_t shard_numel_ = 0;
  std::vector<Extent> extents_, gaps_;
};

}  // namespace tessera
