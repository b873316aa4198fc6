#include "sharding/layout/placement.h"

#include "runtime/config/placement_rows.h"

namespace tessera {

namespace {

AxisPlacement axis_placement_of(CutAxes axes) { return {.shard = axes.rank, .replicate = axes.host}; }

/// Returns the placement of `axes`. A rank's optimizer part lies inside its gradient part. If only the replicate axis
/// cuts gradients, this axis therefore also cuts optimizer state first.
Placement placement_with(const PlacementAxes& axes, bool keep_gathered) {
  Placement placement{axis_placement_of(axes.parameters), axis_placement_of(axes.gradients),
                      axis_placement_of(axes.optimizer), keep_gathered};
  placement.optimizer.replicate_first = axes.gradients.host && !axes.gradients.rank && axes.optimizer.rank;
  return placement;
}

}  // namespace

Placement placement_of(ShardingStrategy strategy, bool optimizer_over_world) {
  const PlacementRow& row = placement_row(strategy, optimizer_over_world);
  return placement_with(row.axes, row.keeps_gathered);
}

Placement placement_of(const Strategy& strategy) {
  return placement_with(placement_axes(strategy), keeps_gathered(strategy));
}

Placement share_parameters(Placement placement) {
  if (!placement.optimizer.shard || placement.optimizer.replicate_first) return placement;
  placement.parameters = {.shard = true};
  placement.keep_gathered = false;
  placement.shared = true;
  return placement;
}

int parts_of(const Placement& placement, const MeshPosition& mesh) {
  const bool world = placement.gradients.replicate || placement.optimizer.replicate;
  return mesh.shard_size * (world ? mesh.replicate_size : 1);
}

Extent owned(AxisPlacement axes, const MeshPosition& mesh, std::int64_t numel) {
  Extent part{0, numel};
  const auto cut = [&part](int index, int size) {
    part.numel /= size;
    part.offset += index * part.numel;
  };
  if (axes.replicate && axes.replicate_first) cut(mesh.replicate_index, mesh.replicate_size);
  if (axes.shard) cut(mesh.shard_index, mesh.shard_size);
  if (axes.replicate && !axes.replicate_first) cut(mesh.replicate_index, mesh.replicate_size);
  return part;
}

}  // namespace tessera
