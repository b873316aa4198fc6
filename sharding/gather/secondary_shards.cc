#include "sharding/gather/secondary_shards.h"

#include <cstring>
#include <utility>

#include "runtime/border/throw.h"
#include "runtime/comm/sum/wire_codec.h"
#include "runtime/torch/tensor_on.h"
#include "sharding/unrecorded.h"

namespace tessera {
namespace {

/// Copies within the device's memory. On the CPU it runs no operator of LibTorch, since a mode of Python could see the
/// operator.
void copy_on(c10::Device device, std::byte* to, const std::byte* from, std::size_t bytes) {
  if (device.is_cpu()) {
    std::memcpy(to, from, bytes);
    return;
  }
  const Unrecorded unrecorded;
  tensor_on(device, to, bytes).copy_(tensor_on(device, from, bytes));
}

}  // namespace

SecondaryShards::SecondaryShards(const MemoryPlan& plan, const std::vector<Unit*>& units, Collectives& group,
                                 Memory memory)
    : plan_(plan), group_(group), memory_(std::move(memory)), parts_(units.size()), has_(units.size(), 0) {
  for (const Unit* unit : units) {
    if (!plan.secondary_holds(static_cast<std::size_t>(unit->index))) continue;
    for (const auto& flat : unit->groups) {
      const std::int64_t bytes = plan.secondary_bytes_of(flat->shape());
      parts_[static_cast<std::size_t>(unit->index)].push_back({memory_.parts.take(bytes), bytes});
    }
  }
  memory_.parts.expect_full();
}

void SecondaryShards::keep(const Unit& unit) {
  if (!plan_.secondary_holds(static_cast<std::size_t>(unit.index))) return;
  for (const auto& flat : unit.groups) {
    const std::int64_t numel = flat->layout.numel() / group_.size(), bytes = numel * flat->element_bytes();
    const std::byte* const own = flat->full + group_.rank() * bytes;
    if (is_rounded(*flat)) {
      encode(WireForm::kInt8, own, flat->dtype, static_cast<std::size_t>(numel), part_of(*flat).memory);
    } else {
      copy_on(flat->device, part_of(*flat).memory, own, static_cast<std::size_t>(bytes));
    }
  }
  has_[static_cast<std::size_t>(unit.index)] = 1;
}

void SecondaryShards::start(const Unit& unit, std::vector<Work>& works) {
  for (const auto& flat : unit.groups) {
    if (is_rounded(*flat)) continue;
    const std::int64_t bytes = flat->layout.numel() / group_.size() * flat->element_bytes();
    works.push_back(group_.all_gather(unit.name, part_of(*flat).memory, flat->full, static_cast<std::size_t>(bytes),
                                      {.dtype = flat->dtype}));
  }
}

/// All flat groups use the same memory for their quantized values (codes), so one flat group is gathered at a time.
void SecondaryShards::finish(const Unit& unit) {
  for (const auto& flat : unit.groups) {
    if (!is_rounded(*flat)) continue;
    const Part& own = part_of(*flat);
    const std::int64_t numel = flat->layout.numel() / group_.size();
    std::byte* const codes = memory_.codes.data();
    throw_if_error(group_.all_gather(unit.name, own.memory, codes, static_cast<std::size_t>(own.bytes)).wait());
    for (std::int64_t rank = 0; rank < group_.size(); ++rank) {
      decode(WireForm::kInt8, codes + rank * own.bytes, flat->dtype, flat->full + rank * numel * flat->element_bytes(),
             static_cast<std::size_t>(numel));
    }
  }
}

}  // namespace tessera
