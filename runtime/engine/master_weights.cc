#include "runtime/engine/master_weights.h"

#include <ATen/Functions.h>

#include <bit>
#include <cstring>

#include "optim/rounding.h"
#include "sharding/dtype.h"

namespace tessera {
namespace {

at::Tensor flat_at(std::byte* memory, DType dtype, std::int64_t numel) {
  return at::from_blob(memory, {numel}, at::TensorOptions(scalar_type_of(dtype)));
}

std::uint32_t bits_of(float value) { return splittable<std::uint32_t>(value); }

/// Both halves: the high one for the parameter part, the low one for what the optimizer updates.
void write_split(FlatGroup& group, const float* values) {
  auto* high = reinterpret_cast<std::uint16_t*>(group.shard);
  const Extent part = group.parameter_part, owned = group.optimizer_part;
  for (std::int64_t i = 0; i < part.numel; ++i) {
    high[i] = static_cast<std::uint16_t>(split_high(bits_of(values[part.offset + i])));
  }
  for (std::int64_t i = 0; i < owned.numel; ++i) {
    group.master_low[i] = static_cast<std::int16_t>(split_low(bits_of(values[owned.offset + i])));
  }
}

/// A value that equals the high half is the master's; the low half is what it lacks.
void keep_split(const FlatGroup& group, float* values) {
  const auto* high = reinterpret_cast<const std::uint16_t*>(group.updated());
  for (std::int64_t i = 0; i < group.optimizer_part.numel; ++i) {
    if (std::bit_cast<std::uint32_t>(values[i]) != std::uint32_t{high[i]} << 16) continue;
    const auto low = static_cast<std::uint32_t>(static_cast<std::int32_t>(group.master_low[i]));
    values[i] = std::bit_cast<float>(join_split(std::uint32_t{high[i]}, low));
  }
}

}  // namespace

void write_values(FlatGroup& group, const at::Tensor& flat) {
  if (group.trainable && group.master_kind == MasterKind::kSplitBF16) {
    return write_split(group, flat.const_data_ptr<float>());
  }
  const Extent part = group.parameter_part, owned = group.optimizer_part;
  flat_at(group.shard, group.dtype, part.numel).copy_(flat.narrow(0, part.offset, part.numel));
  if (group.trainable && group.dtype != DType::kF32) {
    std::memcpy(group.master, flat.const_data_ptr<float>() + owned.offset, owned.numel * 4);
  }
}

void keep_unchanged_masters(const FlatGroup& group, const at::Tensor& flat) {
  if (!group.trainable || group.dtype == DType::kF32) return;
  const at::Tensor values = flat.narrow(0, group.optimizer_part.offset, group.optimizer_part.numel);
  if (group.master_kind == MasterKind::kSplitBF16) return keep_split(group, values.mutable_data_ptr<float>());
  auto* const memory = reinterpret_cast<std::byte*>(group.master);
  const at::Tensor master = flat_at(memory, DType::kF32, group.optimizer_part.numel);
  const at::Tensor same = master.to(scalar_type_of(group.dtype)).to(at::kFloat).eq(values);
  values.copy_(at::where(same, master, values));
}

}  // namespace tessera
