#include "engine/step/queued/own_device_update.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "engine/step/rules/naming.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

constexpr auto kPortion =
    // The number of elements in a call changes no bit of the result.
    static_cast<std::size_t>(ElementwiseOptimizer::kMostElementsOnGpu);

/// Returns the elements [begin, begin + count) of `run`.
DeviceRun part_of(const DeviceRun& run, std::size_t begin, std::size_t count) {
  DeviceRun part = run;
  part.arguments = tessera::part_of(run.arguments, begin, count);
  part.first_element += begin;
  return part;
}

/// Returns the values aligned as kernels need them, copied if necessary: a program may return a part of a larger
/// tensor.
at::Tensor aligned(at::Tensor values) {
  constexpr std::uintptr_t kBytes = 16;
  return reinterpret_cast<std::uintptr_t>(values.data_ptr()) % kBytes == 0 ? std::move(values) : values.clone();
}

}  // namespace

OwnDeviceUpdate::OwnDeviceUpdate(const QueuedContext& context, std::size_t groups, std::size_t parameters)
    : elements_(context.strategy, context.own_rules, context.rates),
      kernels_(context.kernels),
      device_(context.device.device),
      steps_(parameters),
      runs_(groups) {}

const OwnOptimizer& OwnDeviceUpdate::optimizer_of(const UpdateRun& run) const {
  return dynamic_cast<const OwnOptimizer&>(elements_.optimizer_of(run));
}

void OwnDeviceUpdate::begin(std::size_t index, const FlatGroup& group, std::size_t first, std::span<const char> used) {
  runs_[index].clear();
  elements_.find_runs(group, group.optimizer_part, used.subspan(first), steps_.data() + first, runs_[index]);
}

void OwnDeviceUpdate::update(std::size_t index, const FlatGroup& group, const DeviceRun& run, const StateView& view,
                             const UpdateRates& rates, const StepTables& tables) {
  const Unrecorded unrecorded;
  const OptimizerSlice slice = optimizer_slice(group, view);
  for (const UpdateRun& own : runs_[index]) {
    const Extent extent = intersect(own.extent, view.run);
    if (extent.numel == 0) continue;
    const auto first = static_cast<std::size_t>(extent.offset - view.run.offset);
    const auto count = static_cast<std::size_t>(extent.numel);
    const DeviceRun part = part_of(run, first, count);
    if (!own.is_updated) {
      kernels_.assign_weights(part, tables);  // makes the pass in which only averages change
      continue;
    }
    const OwnOptimizer& optimizer = optimizer_of(own);
    const StepScalars scalars = elements_.scalars_of(rates, own);
    for (std::size_t begin = 0; begin < count; begin += kPortion) {
      const std::size_t portion = std::min(count - begin, kPortion);
      DeviceRun piece = part_of(part, begin, portion);
      // `portion` is filled up already (OwnOptimizer::filled_up), so the rule reads exactly `portion` elements.
      const at::Tensor masters = at::empty({static_cast<std::int64_t>(portion)}, at::device(device_).dtype(at::kFloat));
      kernels_.read_weights(piece, masters.data_ptr<float>());
      const at::Tensor updated = naming("unit", group.unit->name, [&] {
        return aligned(optimizer.updated(scalars, slice, first + begin, portion, masters));
      });
      piece.arguments.gradient = updated.data_ptr<float>();
      kernels_.assign_weights(piece, tables);
    }
  }
}

}  // namespace tessera
