#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

class Unit;

/// What storages and units have to do with tessera/observe_pointers.h.
///
/// What a storage on the CPU answers that refuses its pointer to `bytes` bytes; null while nobody observes: then it throws.
std::byte* observed_pointer(std::int64_t bytes);

/// Units whose access changes with observe_pointers (Unit::watch).
void add_observed(Unit& unit);
void remove_observed(Unit& unit);

}  // namespace tessera
