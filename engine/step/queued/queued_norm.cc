#include "engine/step/queued/queued_norm.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "engine/step/agree/gradient_norm.h"
#include "optim/grad_norm.h"
#include "optim/norm_launch.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

NormBuffer buffer_of(const FlatGroup& group, const float* values) {
  return {values, norm_runs(group, group.gradient_part)};
}

std::vector<NormBuffer> buffers_of(std::span<FlatGroup* const> groups) {
  std::vector<NormBuffer> buffers;
  for (const FlatGroup* group : groups) buffers.push_back(buffer_of(*group, group->gradient));
  return buffers;
}

/// Returns the groups at the beginning of `groups` that belong to one unit.
std::span<FlatGroup* const> first_unit(std::span<FlatGroup* const> groups) {
  std::size_t count = 0;
  while (count < groups.size() && groups[count]->unit == groups[0]->unit) ++count;
  return groups.first(count);
}

}  // namespace

NormTables norm_tables(const NormLaunch& launch, DeviceTables& memory) {
  NormTables tables;
  tables.nodes = memory.put<NormTileNode>(launch.nodes);
  tables.first_node = memory.put<std::uint32_t>(launch.first_node);
  tables.tiles = static_cast<std::uint32_t>(launch.first_node.size() - 1);
  tables.spans = memory.put<NormSpan>(launch.spans);
  tables.span_count = static_cast<std::uint32_t>(launch.spans.size());
  return tables;
}

NormTables moved(NormTables tables, const float* made_for, const float* values) {
  const auto bytes = reinterpret_cast<std::intptr_t>(values) - reinterpret_cast<std::intptr_t>(made_for);
  tables.shift = bytes / static_cast<std::ptrdiff_t>(sizeof(float));
  return tables;
}

QueuedNorm::QueuedNorm(std::span<FlatGroup* const> groups, double* sums, bool by_unit, DeviceKernels& kernels,
                       c10::Device device)
    : by_unit_(by_unit), kernels_(kernels), tables_(device) {
  if (!by_unit_) {
    const std::vector<NormBuffer> buffers = buffers_of(groups);
    all_ = norm_tables(norm_launch(buffers, sums, tables_.take<double>(norm_scratch_count(buffers))), tables_);
    return;
  }
  std::size_t most = 0;
  for (auto rest = groups; !rest.empty(); rest = rest.subspan(first_unit(rest).size()))
    most = std::max(most, norm_scratch_count(buffers_of(first_unit(rest))));
  auto* const scratch = tables_.take<double>(most);  // units use it one after another
  // A unit's sum has memory only while it is in use. The tables have the addresses that the unit's gradients would have
  // if they began at `sums`.
  const float* const at = reinterpret_cast<const float*>(sums);
  for (auto rest = groups; !rest.empty(); rest = rest.subspan(first_unit(rest).size())) {
    const float* place = at;
    std::vector<NormBuffer> buffers;
    std::size_t count = 0;
    for (const FlatGroup* group : first_unit(rest)) {
      buffers.push_back(buffer_of(*group, place));
      count += NormSums(buffers.back().runs).count();
      place += group->gradient_part.numel;
    }
    const auto index = static_cast<std::size_t>(rest[0]->unit->index);
    units_.resize(std::max(units_.size(), index + 1));
    units_[index] = {rest[0], {sums, count}, norm_tables(norm_launch(buffers, sums, scratch), tables_), at};
    sums += count;
  }
}

void QueuedNorm::add(const Unit& unit) {
  const auto index = static_cast<std::size_t>(unit.index);
  if (index >= units_.size() || !units_[index].first) return;
  kernels_.norm(moved(units_[index].tables, units_[index].at, units_[index].first->gradient));
}

void QueuedNorm::finish() {
  if (!by_unit_) kernels_.norm(all_);
}

namespace {

std::uint32_t blocks_of(std::int64_t numel) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(numel) + kSquaredBlock - 1) / kSquaredBlock);
}

/// Returns the largest number of blocks that one launch may have.
std::size_t most_blocks(const std::vector<std::unique_ptr<Unit>>& units) {
  std::size_t most = 0;
  for (const auto& unit : units) {
    std::size_t blocks = 0;
    for (const auto& group : unit->groups) {
      if (!group->trainable) continue;
      for (std::size_t i = 0; i < group->parameters.size(); ++i) blocks += blocks_of(group->layout.extent(i).numel);
    }
    most = std::max(most, blocks);
  }
  return most;
}

}  // namespace

QueuedSquares::QueuedSquares(const std::vector<std::unique_ptr<Unit>>& units, at::Tensor of_step,
                             DeviceKernels& kernels, c10::Device device)
    : kernels_(kernels),
      tables_(device),
      is_measured_(tables_.take<std::uint8_t>(units.size())),
      of_step_(std::move(of_step)) {
  launch_.block_sums = tables_.take<double>(most_blocks(units));
  launch_.unit_sum = tables_.take<double>(1);
  launch_.sum = tables_.take<double>(1);
  const auto options = at::TensorOptions().device(device);
  sum_ = at::from_blob(launch_.sum, {1}, options.dtype(at::kDouble));
  measured_ = at::from_blob(is_measured_, {static_cast<std::int64_t>(units.size())}, options.dtype(at::kByte));
}

void QueuedSquares::add(const Unit& unit, std::span<const GradientPiece> pieces, DType dtype) {
  if (pieces.empty()) return;
  has_some_ = true;
  launch_.dtype = dtype;
  launch_.is_measured = is_measured_ + unit.index;
  launch_.begins = true;
  while (!pieces.empty()) {
    const std::size_t count = std::min<std::size_t>(pieces.size(), OwnPieces::kMost);
    launch_.count = static_cast<std::uint32_t>(count);
    launch_.blocks = 0;
    for (std::size_t i = 0; i < count; ++i) {
      launch_.pieces[i] = {pieces[i].values, static_cast<std::uint64_t>(pieces[i].numel), launch_.blocks};
      launch_.blocks += blocks_of(pieces[i].numel);
    }
    pieces = pieces.subspan(count);
    launch_.ends = pieces.empty();
    kernels_.own_squares(launch_);
    launch_.begins = false;
  }
}

void QueuedSquares::take() {
  if (!has_some_) return;
  {
    const Unrecorded unrecorded;
    of_step_.add_(sum_);
  }
  forget();
}

void QueuedSquares::forget() {
  if (!std::exchange(has_some_, false)) return;
  const Unrecorded unrecorded;
  sum_.zero_();
  measured_.zero_();
}

}  // namespace tessera
