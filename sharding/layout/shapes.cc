#include "sharding/layout/shapes.h"

namespace tessera {

std::int64_t UnitShape::gathered_bytes() const {
  std::int64_t bytes = 0;
  for (const GroupShape& group : groups) bytes += group.gathered_bytes();
  return bytes;
}

Extent TensorStates::extent_of(std::size_t tensor) const {
  if (empty() || first[tensor] == first[tensor + 1]) return {};
  const std::int64_t begin = layout.extent(first[tensor]).offset;
  return {begin, layout.extent(first[tensor + 1] - 1).end() - begin};
}

std::int64_t UnitShape::trainable_numel() const {
  std::int64_t numel = 0;
  for (const GroupShape& group : groups) numel += group.trainable ? group.layout.numel() : 0;
  return numel;
}

std::int64_t UnitShape::trainable_parameters() const {
  std::int64_t count = 0;
  for (const GroupShape& group : groups) count += group.trainable ? static_cast<std::int64_t>(group.layout.size()) : 0;
  return count;
}

}  // namespace tessera
