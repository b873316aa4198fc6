#pragma once

#include <cstddef>
#include <cstdint>

#include "sharding/unit.h"

namespace tessera {

/// A 64-bit hash of host memory that tells changed values; never 0.
std::uint64_t hash_of_values(const std::byte* memory, std::int64_t bytes);

/// The hash of all gathered values of a unit. REQUIRES: it is gathered, on the CPU.
std::uint64_t hash_of_gathered(const Unit& unit);

/// The hash of this rank's part of parameter `i`, on the CPU; the hash of nothing where the rank has no part of it.
std::uint64_t hash_of_part(const FlatGroup& group, std::size_t i);

}  // namespace tessera
