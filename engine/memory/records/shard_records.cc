#include "engine/memory/records/shard_records.h"

#include <cstring>

#include "sharding/unit.h"

namespace tessera {

void ShardRecords::start(const FlatGroup& group, std::byte* memory) {
  const Chunks& chunks = group.parameter_chunks;
  const std::int64_t element = group.element_bytes();
  if (group.shard) std::memcpy(memory, group.shard, static_cast<std::size_t>(chunks.before_records() * element));
  for (std::int64_t chunk = chunks.first_record(); chunk < chunks.chunks(); ++chunk) {
    const Extent place = chunks.chunk(chunk);
    records_->start_copy(group.first_parameter_record + chunk - chunks.first_record(),
                         {memory + place.offset * element, static_cast<std::size_t>(place.numel * element)},
                         static_cast<std::uint64_t>(group.unit->index));
  }
}

void ShardRecords::finish(const Unit& unit) { records_->end_copies(static_cast<std::uint64_t>(unit.index)); }

}  // namespace tessera
