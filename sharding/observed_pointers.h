#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>

namespace tessera {

class Unit;

/// Storages and units use these functions to implement tessera/observe_pointers.h.
///
/// Returns the pointer to `bytes` bytes that a storage on the CPU returns instead of a pointer to its memory. It is
/// null while pointers are not observed; the storage then throws.
std::byte* observed_pointer(std::int64_t bytes);

/// Registers and removes units whose access changes with observe_pointers (Unit::watch).
void add_observed(Unit& unit);
void remove_observed(Unit& unit);

}  // namespace tessera
