#include "sharding/layout/layout.h"

#include <algorithm>
#include <bit>

#include "runtime/base/seeded_fault.h"

namespace tessera {
namespace {

/// Returns kBlock if each tensor needs its own blocks. Otherwise returns the smallest power of two, from kLeastCut to
/// kBlock, into which each tensor fits; kBlock if a tensor is larger than a block.
std::int64_t cut_for(std::span<const std::int64_t> numels, SmallTensors small) {
  if (small == SmallTensors::kOwnBlocks) return Layout::kBlock;
  std::int64_t cut = Layout::kLeastCut;
  for (const std::int64_t numel : numels) cut = std::max(cut, std::min(numel, Layout::kBlock));
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(cut)));
}

/// Returns the first offset, at or after `from`, at which a tensor may begin.
std::int64_t place(std::int64_t numel, std::int64_t from, std::int64_t cut, SmallTensors small) {
  if (numel >= cut || small == SmallTensors::kOwnBlocks) return rounded_up(from, cut);
  const std::int64_t start = rounded_up(from, Layout::kAlign);
  return start % cut + numel <= cut ? start : rounded_up(start, cut);
}

}  // namespace

Extent intersect(Extent a, Extent b) {
  const std::int64_t begin = std::max(a.offset, b.offset);
  return {begin, std::max<std::int64_t>(0, std::min(a.end(), b.end()) - begin)};
}

Layout Layout::pack(std::span<const std::int64_t> numels, int parts, SmallTensors small, std::int64_t multiple) {
  Layout layout;
  layout.parts_ = parts;
  layout.cut_ = cut_for(numels, small);
  layout.extents_.reserve(numels.size());
  std::int64_t next = 0;
  for (const std::int64_t numel : numels) {
    layout.extents_.push_back({place(numel, next, layout.cut_, small), numel});
    next = layout.extents_.back().end();
  }
  const std::int64_t least = std::max<std::int64_t>(1, (next + parts - 1) / parts);
  layout.shard_numel_ = rounded_up(least, std::max(layout.cut_, multiple));
  layout.find_gaps();
  return layout;
}

void Layout::find_gaps() {
  std::int64_t next = 0;
  for (const Extent& extent : extents_) {
    if (extent.offset > next) gaps_.push_back({next, extent.offset - next});
    next = extent.end();
  }
  if (seeded_fault(SeededFault::kNoLastGap)) return;
  if (numel() > next) gaps_.push_back({next, numel() - next});
}

std::int64_t Layout::padding() const {
  std::int64_t used = 0;
  for (const Extent& extent : extents_) used += extent.numel;
  return numel() - used;
}

}  // namespace tessera
