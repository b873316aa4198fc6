#include "sharding/layout/layout.h"

#include <algorithm>
#include <optional>

namespace tessera {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// True if a tensor at `offset` has every shard boundary inside it on one of its blocks.
bool respects_blocks(const LayoutItem& item, std::int64_t offset, std::int64_t shard_numel) {
  if (item.block <= 1) return true;
  const std::int64_t first = (offset / shard_numel + 1) * shard_numel;
  if (first >= offset + item.numel) return true;
  if ((first - offset) % item.block != 0) return false;
  return first + shard_numel >= offset + item.numel || shard_numel % item.block == 0;
}

/// The first place at or after `from` where the tensor fits its constraint: as it comes, or so that a block ends on the
/// next shard boundary, or on that boundary.
std::optional<std::int64_t> place(const LayoutItem& item, std::int64_t from, std::int64_t shard_numel,
                                  std::int64_t align) {
  const std::int64_t start = round_up(from, align);
  if (respects_blocks(item, start, shard_numel)) return start;
  const std::int64_t boundary = (start / shard_numel + 1) * shard_numel;
  // Alignment repeats after `align` blocks, so more tries find nothing new.
  std::int64_t blocks = (boundary - start) / item.block;
  for (int tries = 0; tries < align && blocks > 0; ++tries, --blocks) {
    const std::int64_t offset = boundary - blocks * item.block;
    if (offset % align == 0 && respects_blocks(item, offset, shard_numel)) return offset;
  }
  if (respects_blocks(item, boundary, shard_numel)) return boundary;
  return std::nullopt;
}

/// Offsets of all tensors for a given shard size, or nothing if they do not fit.
std::optional<std::vector<Extent>> place_all(std::span<const LayoutItem> items, int parts, std::int64_t shard_numel,
                                             std::int64_t align) {
  std::vector<Extent> extents;
  extents.reserve(items.size());
  std::int64_t next = 0;
  for (const LayoutItem& item : items) {
    const auto offset = place(item, next, shard_numel, align);
    if (!offset || *offset + item.numel > parts * shard_numel) return std::nullopt;
    extents.push_back({*offset, item.numel});
    next = *offset + item.numel;
  }
  return extents;
}

}  // namespace

Extent intersect(Extent a, Extent b) {
  const std::int64_t begin = std::max(a.offset, b.offset);
  return {begin, std::max<std::int64_t>(0, std::min(a.end(), b.end()) - begin)};
}

Layout Layout::pack(std::span<const LayoutItem> items, int parts, std::int64_t align) {
  std::int64_t total = 0;
  for (const LayoutItem& item : items) total = round_up(total, align) + item.numel;
  Layout layout;
  layout.parts_ = parts;
  std::int64_t shard_numel = round_up(std::max<std::int64_t>(1, (total + parts - 1) / parts), kQuantum);
  // Ends: once one shard has room for all tensors, no boundary meets any of them.
  while (true) {
    if (auto extents = place_all(items, parts, shard_numel, align)) {
      layout.extents_ = *std::move(extents);
      layout.shard_numel_ = shard_numel;
      layout.find_gaps();
      return layout;
    }
    shard_numel += kQuantum;
  }
}

void Layout::find_gaps() {
  std::int64_t next = 0;
  for (const Extent& extent : extents_) {
    if (extent.offset > next) gaps_.push_back({next, extent.offset - next});
    next = extent.end();
  }
  if (numel() > next) gaps_.push_back({next, numel() - next});
}

std::int64_t Layout::padding() const {
  std::int64_t used = 0;
  for (const Extent& extent : extents_) used += extent.numel;
  return numel() - used;
}

}  // namespace tessera
