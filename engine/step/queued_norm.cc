#include "engine/step/queued_norm.h"

#include <algorithm>
#include <utility>

#include "engine/step/gradient_norm.h"
#include "optim/grad_norm.h"
#include "optim/norm_launch.h"

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

/// The first of `groups` that are of one unit.
std::span<FlatGroup* const> first_unit(std::span<FlatGroup* const> groups) {
  std::size_t count = 0;
  while (count < groups.size() && groups[count]->unit == groups[0]->unit) ++count;
  return groups.first(count);
}

}  // namespace

QueuedNorm::QueuedNorm(std::span<FlatGroup* const> groups, double* sums,
                       std::shared_ptr<const DeviceGradients> gradients, DeviceKernels& kernels, c10::Device device)
    : gradients_(std::move(gradients)), kernels_(kernels), tables_(device) {
  if (!gradients_) {
    const std::vector<NormBuffer> buffers = buffers_of(groups);
    all_ = put(norm_launch(buffers, sums, tables_.take<double>(norm_scratch_count(buffers))));
    return;
  }
  std::size_t most = 0;
  for (auto rest = groups; !rest.empty(); rest = rest.subspan(first_unit(rest).size()))
    most = std::max(most, norm_scratch_count(buffers_of(first_unit(rest))));
  auto* const scratch = tables_.take<double>(most);  // of one unit after the other
  for (auto rest = groups; !rest.empty(); rest = rest.subspan(first_unit(rest).size())) {
    plan_unit(first_unit(rest), sums, scratch);
    for (const NormBuffer& buffer : buffers_of(first_unit(rest))) sums += NormSums(buffer.runs).count();
  }
}

/// For each place that its sums may have.
void QueuedNorm::plan_unit(std::span<FlatGroup* const> groups, double* sums, double* scratch) {
  const auto index = static_cast<std::size_t>(groups[0]->unit->index);
  units_.resize(std::max(units_.size(), index + 1));
  if (index == 0) return units_[index].push_back(put(norm_launch(buffers_of(groups), sums, scratch)));
  const DeviceGradients::Slots& slots = gradients_->slots();
  for (std::int64_t slot = 0; slot < slots.count; ++slot) {
    const auto* place = reinterpret_cast<const float*>(slots.memory + slot * slots.bytes);
    std::vector<NormBuffer> buffers;
    for (const FlatGroup* group : groups) {
      buffers.push_back(buffer_of(*group, place));
      place += group->gradient_part.numel;
    }
    units_[index].push_back(put(norm_launch(buffers, sums, scratch)));
  }
}

NormTables QueuedNorm::put(const NormLaunch& launch) {
  NormTables tables;
  tables.nodes = tables_.put<NormTileNode>(launch.nodes);
  tables.first_node = tables_.put<std::uint32_t>(launch.first_node);
  tables.tiles = static_cast<std::uint32_t>(launch.first_node.size() - 1);
  tables.spans = tables_.put<NormSpan>(launch.spans);
  tables.span_count = static_cast<std::uint32_t>(launch.spans.size());
  return tables;
}

void QueuedNorm::add(const Unit& unit) {
  const auto index = static_cast<std::size_t>(unit.index);
  if (index >= units_.size() || units_[index].empty()) return;
  const int slot = gradients_->slot_of(unit);
  kernels_.norm(units_[index][static_cast<std::size_t>(std::max(slot, 0))]);
}

void QueuedNorm::finish() {
  if (!gradients_) kernels_.norm(all_);
}

}  // namespace tessera
