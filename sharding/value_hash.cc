#include "sharding/value_hash.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tessera {

std::uint64_t hash_of_values(const std::byte* memory, std::int64_t bytes) {
  const std::uint64_t hash = XXH3_64bits(memory, static_cast<std::size_t>(bytes));
  return hash == 0 ? 1 : hash;
}

std::uint64_t hash_of_gathered(const Unit& unit) {
  std::uint64_t hash = 1;
  for (const auto& group : unit.groups) hash = hash * 31 + hash_of_values(group->full, group->gathered_bytes());
  return hash == 0 ? 1 : hash;
}

std::uint64_t hash_of_part(const FlatGroup& group, std::size_t i) {
  const Extent own = group.trainable ? group.optimizer_part : group.parameter_part;
  // Nobody else can write what lies in records.
  const std::int64_t in_memory =
      group.parameters_below ? group.parameter_chunks.before_records() : group.parameter_part.numel;
  const Extent part = intersect(intersect(group.layout.extent(i), own), {group.parameter_part.offset, in_memory});
  if (part.numel <= 0) return hash_of_values(nullptr, 0);
  const std::int64_t begin = (part.offset - group.parameter_part.offset) * group.element_bytes();
  return hash_of_values(group.shard + begin, part.numel * group.element_bytes());
}

}  // namespace tessera
