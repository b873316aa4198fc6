#include "engine/memory/master_weights.h"

#include <ATen/Functions.h>

#include <bit>
#include <cstring>
#include <span>

#include "engine/memory/host_view.h"
#include "optim/rounding.h"
#include "sharding/memory_view.h"

namespace tessera {
namespace {

std::uint32_t bits_of(float value) { return splittable<std::uint32_t>(value); }

/// Both halves: the high one for the parameter part, the low one for what the optimizer updates.
void write_split(FlatGroup& group, const float* values, Extent at) {
  const Extent part = intersect(group.parameter_part, at), owned = intersect(group.optimizer_part, at);
  const HostView parameters(group.shard + (part.offset - group.parameter_part.offset) * 2, part.numel * 2, group.device,
                            HostView::kUndefined);
  const HostView lows(group.master_low + (owned.offset - group.optimizer_part.offset), owned.numel * 2, group.device,
                      HostView::kUndefined);
  auto* const high = reinterpret_cast<std::uint16_t*>(parameters.data());
  auto* const low = reinterpret_cast<std::int16_t*>(lows.data());
  for (std::int64_t i = 0; i < part.numel; ++i) {
    high[i] = static_cast<std::uint16_t>(split_high(bits_of(values[part.offset - at.offset + i])));
  }
  for (std::int64_t i = 0; i < owned.numel; ++i) {
    low[i] = static_cast<std::int16_t>(split_low(bits_of(values[owned.offset - at.offset + i])));
  }
  parameters.write_back();
  lows.write_back();
}

/// A value that equals the high half is the master's; the low half is what it lacks.
void keep_split(const FlatGroup& group, float* values) {
  const std::int64_t numel = group.optimizer_part.numel;
  const HostView parameters(group.updated(), numel * 2, group.device, HostView::kFetch);
  const HostView masters(group.master_low, numel * 2, group.device, HostView::kFetch);
  const auto* const high = reinterpret_cast<const std::uint16_t*>(parameters.data());
  const auto* const low = reinterpret_cast<const std::int16_t*>(masters.data());
  for (std::int64_t i = 0; i < numel; ++i) {
    if (std::bit_cast<std::uint32_t>(values[i]) != std::uint32_t{high[i]} << 16) continue;
    const auto rest = static_cast<std::uint32_t>(static_cast<std::int32_t>(low[i]));
    values[i] = std::bit_cast<float>(join_split(std::uint32_t{high[i]}, rest));
  }
}

}  // namespace

void write_values(FlatGroup& group, const at::Tensor& values, Extent at) {
  if (group.trainable && group.master_kind == MasterKind::kSplitBF16) {
    return write_split(group, values.const_data_ptr<float>(), at);
  }
  const Extent part = intersect(group.parameter_part, at);
  if (part.numel > 0) {
    const HostView parameters(group.shard + (part.offset - group.parameter_part.offset) * group.element_bytes(),
                              part.numel * group.element_bytes(), group.device, HostView::kUndefined);
    flat_view(parameters.data(), group.dtype, part.numel, at::kCPU)
        .copy_(values.narrow(0, part.offset - at.offset, part.numel));
    parameters.write_back();
  }
  const Extent owned = intersect(group.optimizer_part, at);
  if (!group.trainable || group.dtype == DType::kF32 || owned.numel == 0) return;
  const HostView masters(group.master + (owned.offset - group.optimizer_part.offset), owned.numel * 4, group.device,
                         HostView::kUndefined);
  std::memcpy(masters.data(), values.const_data_ptr<float>() + (owned.offset - at.offset), owned.numel * 4);
  masters.write_back();
}

at::ScalarType flat_type_of(const FlatGroup& group) {
  return scalar_type_of(group.trainable ? DType::kF32 : group.dtype);
}

void read_values(const FlatGroup& group, const at::Tensor& flat) {
  const Extent part = group.trainable ? group.optimizer_part : group.parameter_part;
  const at::Tensor piece = flat.narrow(0, part.offset, part.numel);
  if (group.trainable && group.master_kind == MasterKind::kF32 && group.dtype != DType::kF32) {
    const HostView masters(group.master, part.numel * 4, group.device, HostView::kFetch);
    std::memcpy(piece.data_ptr(), masters.data(), static_cast<std::size_t>(part.numel) * 4);
    return;
  }
  std::byte* const memory = group.trainable ? group.updated() : group.shard;
  const HostView parameters(memory, part.numel * group.element_bytes(), group.device, HostView::kFetch);
  piece.copy_(flat_view(parameters.data(), group.dtype, part.numel, at::kCPU));
  if (group.trainable && group.master_kind == MasterKind::kSplitBF16)
    keep_split(group, piece.mutable_data_ptr<float>());
}

at::Tensor rounded_master(const at::Tensor& master, const FlatGroup& group) {
  if (group.master_kind != MasterKind::kSplitBF16) return master.to(scalar_type_of(group.dtype)).to(at::kFloat);
  at::Tensor high = at::empty_like(master, at::MemoryFormat::Contiguous).copy_(master);
  const std::span values(high.mutable_data_ptr<float>(), static_cast<std::size_t>(high.numel()));
  for (float& value : values) value = std::bit_cast<float>(split_high(bits_of(value)) << 16);
  return high;
}

void keep_unchanged_masters(const FlatGroup& group, const at::Tensor& flat) {
  if (!group.trainable || group.dtype == DType::kF32) return;
  const at::Tensor values = flat.narrow(0, group.optimizer_part.offset, group.optimizer_part.numel);
  if (group.master_kind == MasterKind::kSplitBF16) return keep_split(group, values.mutable_data_ptr<float>());
  const HostView masters(group.master, group.optimizer_part.numel * 4, group.device, HostView::kFetch);
  const at::Tensor master = flat_view(masters.data(), DType::kF32, group.optimizer_part.numel, at::kCPU);
  values.copy_(at::where(rounded_master(master, group).eq(values), master, values));
}

}  // namespace tessera
