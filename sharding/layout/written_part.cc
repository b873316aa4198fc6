#include "sharding/layout/written_part.h"

#include <algorithm>
#include <utility>

#include "sharding/layout/layout.h"

namespace tessera {
namespace {

/// Returns the number of ranks that hold the same part, and this rank's index among them.
std::pair<std::int64_t, std::int64_t> replicas(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel) {
  const Extent own = owned(axes, mesh, numel);
  const int rank = mesh.replicate_index * mesh.shard_size + mesh.shard_index;
  std::int64_t count = 0, index = 0;
  for (int other = 0; other < mesh.world_size(); ++other) {
    if (owned(axes, mesh.of(other), numel) != own) continue;
    if (other < rank) ++index;
    ++count;
  }
  return {count, index};
}

}  // namespace

Extent written_part(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel) {
  const Extent own = owned(axes, mesh, numel);
  const auto [count, index] = replicas(axes, mesh, numel);
  // The cuts between ranks' parts lie between blocks of the buffer. They cut no small tensor, and cut large tensors
  // only between the tensors' blocks (Layout).
  const auto cut = [&](std::int64_t i) {
    const std::int64_t at = own.offset + own.numel / count * i;
    return i == 0       ? own.offset
           : i == count ? own.end()
                        : std::min(own.end(), (at + Layout::kBlock - 1) / Layout::kBlock * Layout::kBlock);
  };
  return {cut(index), cut(index + 1) - cut(index)};
}

std::int64_t most_written(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel) {
  const std::int64_t own = owned(axes, mesh, numel).numel;
  if (own == 0) return 0;
  const std::int64_t parts = numel / own, count = mesh.world_size() / parts;  // ranks that hold the same part
  return count == 1 ? own : std::min(own, own / count + count + Layout::kBlock);
}

}  // namespace tessera
