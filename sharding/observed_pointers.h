#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>

namespace tessera {

class Unit;

/// How storages and units answer tessera/observe_pointers.h.
///
/// The pointer to `bytes` bytes that a storage on the CPU gives out where it refuses its own; null while nobody
/// observes, and the storage throws then.
std::byte* observed_pointer(std::int64_t bytes);

/// Registers and removes units whose access changes with observe_pointers (Unit::watch).
void add_observed(Unit& unit);
void remove_observed(Unit& unit);

}  // namespace tessera
