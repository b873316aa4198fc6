#include "engine/memory/records/part_carrier.h"

#include <cstring>

namespace tessera {

void PartCarrier::announce(std::span<const std::int64_t> units) {
  for (const std::int64_t unit : units) {
    for (const auto& group : units_[static_cast<std::size_t>(unit)]->groups) start(*group);
  }
}

void PartCarrier::start(const FlatGroup& group) {
  std::byte* const memory = group.part_in_full();
  const std::int64_t before = group.parameters_below.chunks.before_records() * group.element_bytes();
  if (group.shard) std::memcpy(memory, group.shard, static_cast<std::size_t>(before));
  start_copies(group, memory + before);
}

void PartCarrier::start_copies(const FlatGroup& group, std::byte* memory) const {
  const Chunks& chunks = group.parameters_below.chunks;
  const std::int64_t element = group.element_bytes();
  for (std::int64_t chunk = chunks.first_record(); chunk < chunks.chunks(); ++chunk) {
    const Extent place = chunks.chunk(chunk);
    records_->start_copy(
        group.parameters_below.first_record + chunk - chunks.first_record(),
        {memory + (place.offset - chunks.before_records()) * element, static_cast<std::size_t>(place.numel * element)},
        static_cast<std::uint64_t>(group.unit->index));
  }
}

std::span<std::byte> PartCarrier::take(std::int64_t unit, LeaseUse /*use*/) {
  records_->end_copies(static_cast<std::uint64_t>(unit));
  return {};
}

}  // namespace tessera
