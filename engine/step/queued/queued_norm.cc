#include "engine/step/queued/queued_norm.h"

#include <algorithm>
#include <cstdint>

#include "engine/step/agree/gradient_norm.h"
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
  auto* const scratch = tables_.take<double>(most);  // units use it one after the other
  // A unit's sum has memory only while it is in use. The tables have the addresses that its gradients would have if the
  // sum began here.
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

}  // namespace tessera
