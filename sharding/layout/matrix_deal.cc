#include "sharding/layout/matrix_deal.h"

#include <algorithm>
#include <numeric>

namespace tessera {

std::int64_t MatrixDeal::cost_of(MatrixShape shape, MatrixWork work) {
  if (!work.multiplies) return shape.rows * shape.columns;
  const std::int64_t shorter = std::min(shape.rows, shape.columns), longer = std::max(shape.rows, shape.columns);
  return shorter * shorter * (2 * longer + shorter);
}

MatrixDeal::MatrixDeal(std::span<const UnitShape> units, AxisPlacement optimizer, const MeshPosition& mesh,
                       MatrixWork work, bool by_unit)
    : axes_(optimizer), work_(work), mesh_(mesh) {
  MatrixBatch batch;
  const auto close = [&] {
    measure(batch);
    batches_.push_back(batch);
    batch = {
        .begin = matrices_.size(), .end = matrices_.size(), .begin_unit = batch.end_unit, .end_unit = batch.end_unit};
  };
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (std::size_t g = 0; g < units[u].groups.size(); ++g) {
      const GroupShape& group = units[u].groups[g];
      for (std::size_t i = 0; i < group.matrices.size(); ++i) {
        const TensorStates& states = group.tensor_states;
        matrices_.push_back({u, g, i, group.layout.extent(i), group.layout.numel(), group.matrices[i], 0,
                             states.extent_of(i), states.numel()});
      }
    }
    batch.end_unit = u + 1;
    if (batch.end == matrices_.size()) continue;
    batch.end = matrices_.size();
    deal(batch);
    if (by_unit || is_even(batch)) close();
  }
  if (batch.begin == batch.end) return;
  if (!batches_.empty()) {  // the matrices that are left are too few for an even division
    batch.begin = batches_.back().begin;
    batch.begin_unit = batches_.back().begin_unit;
    batches_.pop_back();
    deal(batch);
  }
  close();
}

const MatrixBatch* MatrixDeal::batch_of(std::size_t unit) const {
  const auto batch = std::ranges::lower_bound(batches_, unit + 1, {}, &MatrixBatch::end_unit);
  return batch != batches_.end() && batch->end_unit == unit + 1 ? &*batch : nullptr;
}

/// Deals matrices to ranks, the most expensive matrix first. Each matrix goes to the rank that has the least work so
/// far.
void MatrixDeal::deal(MatrixBatch& batch) {
  std::vector<std::size_t> order(batch.end - batch.begin);
  std::iota(order.begin(), order.end(), batch.begin);
  const auto cost = [&](std::size_t i) { return cost_of(matrices_[i].shape, work_); };
  std::ranges::stable_sort(order, std::ranges::greater(), cost);
  std::vector<std::int64_t> loads(static_cast<std::size_t>(mesh_.world_size()));
  for (const std::size_t i : order) {
    const auto least = std::ranges::min_element(loads);
    *least += cost(i);
    matrices_[i].owner = static_cast<int>(least - loads.begin());
  }
}

bool MatrixDeal::is_even(const MatrixBatch& batch) const {
  std::vector<std::int64_t> loads(static_cast<std::size_t>(mesh_.world_size()));
  for (const DealtMatrix& matrix : matrices_of(batch))
    loads[static_cast<std::size_t>(matrix.owner)] += cost_of(matrix.shape, work_);
  const std::int64_t all = std::accumulate(loads.begin(), loads.end(), std::int64_t{0});
  return static_cast<double>(*std::ranges::max_element(loads)) * static_cast<double>(loads.size()) <=
         kMostUneven * static_cast<double>(all);
}

Extent MatrixDeal::part_of(Extent extent, std::int64_t buffer_numel, int rank) const {
  return intersect(extent, owned(axes_, mesh_.of(rank), buffer_numel));
}

/// Returns whether rank `from` sends its part. If several ranks hold the same part, only the rank in the owner's
/// replica sends it.
bool MatrixDeal::is_nearest(const DealtMatrix& matrix, int from) const {
  const MeshPosition sender = mesh_.of(from), owner = mesh_.of(matrix.owner);
  return (axes_.shard || sender.shard_index == owner.shard_index) &&
         (axes_.replicate || sender.replicate_index == owner.replicate_index);
}

Extent MatrixDeal::collected_piece(const DealtMatrix& matrix, int from) const {
  return is_nearest(matrix, from) ? returned_piece(matrix, from) : Extent{matrix.extent.offset, 0};
}

Extent MatrixDeal::returned_piece(const DealtMatrix& matrix, int to) const {
  return part_of(matrix.extent, matrix.group_numel, to);
}

Extent MatrixDeal::collected_states(const DealtMatrix& matrix, int from) const {
  return is_nearest(matrix, from) ? returned_states(matrix, from) : Extent{matrix.states.offset, 0};
}

Extent MatrixDeal::returned_states(const DealtMatrix& matrix, int to) const {
  return part_of(matrix.states, matrix.states_numel, to);
}

void MatrixDeal::measure(MatrixBatch& batch) const {
  const auto world = static_cast<std::size_t>(mesh_.world_size());
  std::vector<std::int64_t> to_owner(world * world), from_owner(world * world);
  for (const DealtMatrix& matrix : matrices_of(batch)) {
    const std::size_t row = static_cast<std::size_t>(matrix.owner) * world;
    for (std::size_t rank = 0; rank < world; ++rank) {
      const auto number = static_cast<int>(rank);
      if (number == matrix.owner) continue;  // the owner's own part is not sent
      to_owner[row + rank] +=
          collected_values() * collected_piece(matrix, number).numel + collected_states(matrix, number).numel;
      from_owner[row + rank] += returned_piece(matrix, number).numel + returned_states(matrix, number).numel;
    }
  }
  batch.collected = *std::ranges::max_element(to_owner);
  batch.returned = *std::ranges::max_element(from_owner);
}

std::int64_t MatrixDeal::exchange_numel() const {
  std::int64_t most = 0;
  for (const MatrixBatch& batch : batches_) most = std::max({most, batch.collected, batch.returned});
  return in_whole_lines(most * mesh_.world_size());  // the next message begins on a cache line
}

std::int64_t MatrixDeal::work_numel() const {
  std::int64_t most = 0;
  for (const DealtMatrix& matrix : matrices_) {
    const std::int64_t numel = in_whole_lines(matrix.extent.numel);
    const std::int64_t shorter = std::min(matrix.shape.rows, matrix.shape.columns);
    most = std::max(most, work_.is_muon ? 3 * numel + 2 * in_whole_lines(shorter * shorter)
                                        : 2 * numel + in_whole_lines(matrix.states.numel));
  }
  return most;
}

std::int64_t work_where_it_lies(const GroupShape& group, MatrixWork work, bool is_cut) {
  std::int64_t most = 0;
  for (std::size_t i = 0; i < group.matrices.size(); ++i) {
    const std::int64_t numel = MatrixDeal::in_whole_lines(group.layout.extent(i).numel);
    const std::int64_t shorter = std::min(group.matrices[i].rows, group.matrices[i].columns);
    const std::int64_t joined = is_cut ? numel + MatrixDeal::in_whole_lines(group.tensor_states.extent_of(i).numel) : 0;
    most = std::max(most, work.is_muon ? 2 * numel + 2 * MatrixDeal::in_whole_lines(shorter * shorter) : joined);
  }
  return most;
}

std::int64_t MatrixDeal::own_numel() const {
  std::int64_t most = 0;
  for (const MatrixBatch& batch : batches_) {
    std::vector<std::int64_t> own(static_cast<std::size_t>(mesh_.world_size()));
    for (const DealtMatrix& matrix : matrices_of(batch))
      own[static_cast<std::size_t>(matrix.owner)] += in_whole_lines(collected_piece(matrix, matrix.owner).numel);
    most = std::max(most, *std::ranges::max_element(own));
  }
  return most;
}

}  // namespace tessera
