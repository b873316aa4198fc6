#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>

namespace tessera {

class Unit;

/// Storages and units implement tessera/observe_pointers.h with these functions.
///
/// Returns the pointer to `bytes` bytes that a storage on the CPU gives out in place of its memory. It is null while
/// nobody observes, and then the storage throws.
std::byte* observed_pointer(std::int64_t bytes);

/// Registers and removes units whose access changes with observe_pointers (Unit::watch).
void add_observed(Unit& unit);
void remove_observed(Unit& unit);

}  // namespace tessera
