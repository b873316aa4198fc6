#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/memory/records/tier_carrier.h"

namespace tessera {

/// Returns the memory of each record, which never moves. REQUIRES: records lie in memory, not in files.
inline std::vector<std::span<std::byte>> places_of(TierCarrier& records) {
  std::vector<std::span<std::byte>> places;
  for (std::int64_t record = 0; record < records.records(); ++record) {
    Lease lease = records.acquire(record, LeaseUse::kChange);
    places.push_back(lease.bytes());
    lease.give_back();
  }
  return places;
}

}  // namespace tessera
