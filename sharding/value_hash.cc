#include "sharding/value_hash.h"

#include <ATen/ops/sum.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "runtime/torch/tensor_on.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

std::uint64_t never_0(const ValueHash& hash) { return hash.value() == 0 ? 1 : hash.value(); }

}  // namespace

void ValueHash::add(MemoryPlace place, const void* memory, std::int64_t bytes) {
  view_in_portions(memory, bytes, place, [&](const std::byte* data, std::int64_t count) {
    add({data, static_cast<std::size_t>(count)});
  });
}

void ValueHash::add(std::span<const std::byte> bytes) {
  value_ = XXH3_64bits_withSeed(bytes.data(), bytes.size(), value_);
}

std::uint64_t hash_of_gathered(const Unit& unit, c10::Device device) {
  ValueHash hash;
  for (const auto& group : unit.groups) hash.add(device, group->full, group->gathered_bytes());
  return never_0(hash);
}

std::uint64_t hash_of_gathered(const FlatGroup& group, std::size_t i) {
  const Extent extent = group.layout.extent(i);
  const std::int64_t bytes = extent.numel * group.element_bytes();
  if (bytes == 0) return 0;
  const std::byte* const values = group.full + extent.offset * group.element_bytes();
  if (!group.device.is_cpu()) {
    // The last word may have padding, which belongs to no other tensor (Layout::kAlign) and does not change.
    const Unrecorded unrecorded;
    const at::Tensor words = tensor_on(group.device, values, static_cast<std::size_t>((bytes + 7) / 8), at::kLong);
    return static_cast<std::uint64_t>(words.sum().item<std::int64_t>());
  }
  ValueHash hash;
  hash.add(group.device, values, bytes);
  return hash.value();
}

std::uint64_t hash_of_part(const FlatGroup& group, std::size_t i, c10::Device device) {
  const Extent own = group.trainable ? group.optimizer_part : group.parameter_part;
  // Only the part in memory is hashed, since the program cannot write the part that lies in records.
  const std::int64_t in_memory =
      group.parameters_below.carrier ? group.parameters_below.chunks.before_records() : group.parameter_part.numel;
  const Extent part = intersect(intersect(group.layout.extent(i), own), {group.parameter_part.offset, in_memory});
  ValueHash hash;
  if (part.numel > 0) {
    const std::int64_t begin = (part.offset - group.parameter_part.offset) * group.element_bytes();
    hash.add(device, group.shard + begin, part.numel * group.element_bytes());
  }
  return never_0(hash);
}

}  // namespace tessera
