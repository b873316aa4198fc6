#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <span>

#include "sharding/host_view.h"
#include "sharding/unit.h"

namespace tessera {

/// A 64-bit hash over portions of memory, one after another. The hash differs if values have changed. Ranks that
/// compare hashes must add the same portions. `add` waits for the device whose memory it gets.
class ValueHash {
 public:
  void add(MemoryPlace place, const void* memory, std::int64_t bytes);
  /// Adds bytes that are not training state, in one portion.
  void add(std::span<const std::byte> bytes);
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0;
};

/// Returns the hash of all gathered values of a unit; never 0. REQUIRES: the unit is gathered. `device` is where the
/// values lie.
std::uint64_t hash_of_gathered(const Unit& unit, c10::Device device);

/// Returns a hash of the gathered values of parameter `i`. REQUIRES: the unit is gathered. A GPU adds up the values'
/// words, so that only their sum is copied to the host. The sum does not show a change of order alone.
std::uint64_t hash_of_gathered(const FlatGroup& group, std::size_t i);

/// Returns the hash of this rank's part of parameter `i`, without the portion that lies in records. `device` is the
/// device of the part. If the part is empty, the result is the hash of no bytes. The result is never 0.
std::uint64_t hash_of_part(const FlatGroup& group, std::size_t i, c10::Device device);

}  // namespace tessera
