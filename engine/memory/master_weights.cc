#include "engine/memory/master_weights.h"

#include <ATen/Functions.h>

#include <bit>
#include <cstring>
#include <span>

#include "engine/memory/state_views.h"
#include "optim/arithmetic/rounding.h"
#include "runtime/base/seeded_fault.h"
#include "sharding/host_view.h"
#include "sharding/memory_view.h"

namespace tessera {
namespace {

std::uint32_t bits_of(float value) { return splittable<std::uint32_t>(value); }

/// Writes the high halves of `values` as the view's run of parameters.
void write_high(const StateView& view, const float* values) {
  const HostView parameters(view.parameter, view.run.numel * 2, view.parameter_place, HostView::kUndefined);
  auto* const high = reinterpret_cast<std::uint16_t*>(parameters.data());
  for (std::int64_t i = 0; i < view.run.numel; ++i) {
    high[i] = static_cast<std::uint16_t>(split_high(bits_of(values[i])));
  }
  parameters.write_back();
}

/// Writes `values` [run], rounded to the group's dtype, as the view's run of parameters.
void write_rounded(const FlatGroup& group, const StateView& view, const at::Tensor& values) {
  const HostView parameters(view.parameter, view.run.numel * group.element_bytes(), view.parameter_place,
                            HostView::kUndefined);
  flat_view(parameters.data(), group.dtype, view.run.numel, at::kCPU).copy_(values);
  parameters.write_back();
}

/// For the view's run, writes those bits of masters that the parameters do not hold: the low halves, or all bits.
void write_masters(const FlatGroup& group, const StateView& view, const float* values) {
  const bool is_split = group.master_kind == MasterKind::kSplitBF16;
  void* const memory = is_split ? static_cast<void*>(view.low) : view.master;
  const HostView masters(memory, view.run.numel * group.records.state().master_bytes, view.masters_place,
                         HostView::kUndefined);
  if (is_split) {
    auto* const low = reinterpret_cast<std::int16_t*>(masters.data());
    for (std::int64_t i = 0; i < view.run.numel; ++i) low[i] = static_cast<std::int16_t>(split_low(bits_of(values[i])));
  } else {
    std::memcpy(masters.data(), values, static_cast<std::size_t>(view.run.numel) * 4);
  }
  masters.write_back();
}

/// If one of `values` (the view's run) equals the high half of its master, replaces it by the exact master. Such a
/// value was not changed, so only its low half was missing.
void keep_split(const StateView& view, float* values) {
  const std::int64_t numel = view.run.numel;
  const HostView parameters(view.parameter, numel * 2, view.parameter_place, HostView::kFetch);
  const HostView masters(view.low, numel * 2, view.masters_place, HostView::kFetch);
  const auto* const high = reinterpret_cast<const std::uint16_t*>(parameters.data());
  const auto* const low = reinterpret_cast<const std::int16_t*>(masters.data());
  for (std::int64_t i = 0; i < numel; ++i) {
    if (std::bit_cast<std::uint32_t>(values[i]) != std::uint32_t{high[i]} << 16) continue;
    const auto rest = static_cast<std::uint32_t>(static_cast<std::int32_t>(low[i]));
    values[i] = std::bit_cast<float>(join_split(std::uint32_t{high[i]}, rest));
  }
}

at::Tensor rounded_to_even(const at::Tensor& master, DType dtype) {
  return master.to(scalar_type_of(dtype)).to(at::kFloat);
}

/// Returns the high halves of split masters, as fp32.
at::Tensor widened_high(const at::Tensor& master) {
  at::Tensor high = at::empty_like(master, at::MemoryFormat::Contiguous).copy_(master);
  const std::span values(high.mutable_data_ptr<float>(), static_cast<std::size_t>(high.numel()));
  for (float& value : values) value = std::bit_cast<float>(split_high(bits_of(value)) << 16);
  return high;
}

bool has_masters_beside(const FlatGroup& group) { return group.trainable && group.dtype != DType::kF32; }

}  // namespace

void write_values(FlatGroup& group, const at::Tensor& values, Extent at) {
  const bool is_split = group.trainable && group.master_kind == MasterKind::kSplitBF16;
  for_each_state(group, StateKind::kParameters, intersect(group.parameter_part, at), StateUse::kUpdate,
                 [&](const StateView& view) {
                   const std::int64_t begin = view.run.offset - at.offset;
                   if (is_split) return write_high(view, values.const_data_ptr<float>() + begin);
                   write_rounded(group, view, values.narrow(0, begin, view.run.numel));
                 });
  if (!has_masters_beside(group) || seeded_fault(SeededFault::kMastersNotWritten)) return;
  for_each_state(group, StateKind::kMastersAndStates, intersect(group.optimizer_part, at), StateUse::kUpdate,
                 [&](const StateView& view) {
                   write_masters(group, view, values.const_data_ptr<float>() + (view.run.offset - at.offset));
                 });
}

at::ScalarType flat_type_of(const FlatGroup& group) {
  return scalar_type_of(group.trainable ? DType::kF32 : group.dtype);
}

void read_values(const FlatGroup& group, const at::Tensor& flat) {
  const bool has_whole_masters = has_masters_beside(group) && group.master_kind == MasterKind::kF32;
  if (has_whole_masters) {
    for_each_state(group, StateKind::kMastersAndStates, group.optimizer_part, StateUse::kRead,
                   [&](const StateView& view) {
                     const HostView masters(view.master, view.run.numel * 4, view.masters_place, HostView::kFetch);
                     std::memcpy(flat.mutable_data_ptr<float>() + view.run.offset, masters.data(),
                                 static_cast<std::size_t>(view.run.numel) * 4);
                   });
    return;
  }
  for_each_state(
      group, StateKind::kParameters, group.trainable ? group.optimizer_part : group.parameter_part, StateUse::kRead,
      [&](const StateView& view) {
        const std::int64_t numel = view.run.numel;
        const HostView parameters(view.parameter, numel * group.element_bytes(), view.parameter_place,
                                  HostView::kFetch);
        flat.narrow(0, view.run.offset, numel).copy_(flat_view(parameters.data(), group.dtype, numel, at::kCPU));
      });
  keep_unchanged_masters(group, flat);
}

at::Tensor rounded_master(const at::Tensor& master, const FlatGroup& group) {
  return group.master_kind == MasterKind::kSplitBF16 ? widened_high(master) : rounded_to_even(master, group.dtype);
}

at::Tensor masters_of_frozen(const at::Tensor& master, const at::Tensor& held, DType dtype) {
  at::Tensor is_rounded = held.eq(rounded_to_even(master, dtype));
  if (dtype == DType::kBF16) is_rounded = is_rounded.logical_or(held.eq(widened_high(master)));
  return at::where(is_rounded, master, held);
}

void keep_unchanged_masters(const FlatGroup& group, const at::Tensor& flat) {
  if (!has_masters_beside(group)) return;
  const bool is_split = group.master_kind == MasterKind::kSplitBF16;
  const StateKind kind = is_split ? StateKind::kAll : StateKind::kMastersAndStates;
  for_each_state(group, kind, group.optimizer_part, StateUse::kRead, [&](const StateView& view) {
    const at::Tensor values = flat.narrow(0, view.run.offset, view.run.numel);
    if (is_split) return keep_split(view, values.mutable_data_ptr<float>());
    const HostView masters(view.master, view.run.numel * 4, view.masters_place, HostView::kFetch);
    const at::Tensor master = flat_view(masters.data(), DType::kF32, view.run.numel, at::kCPU);
    values.copy_(at::where(rounded_master(master, group).eq(values), master, values));
  });
}

}  // namespace tessera
