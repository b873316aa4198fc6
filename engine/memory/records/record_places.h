#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/memory/records/state_records.h"

namespace tessera {

/// Returns the memory of each record, which never moves. REQUIRES: records lie in memory, not in files.
inline std::vector<std::span<std::byte>> places_of(StateRecords& records) {
  std::vector<std::span<std::byte>> places;
  for (std::int64_t record = 0; record < records.records(); ++record) {
    places.push_back(records.hold(record));
    records.let_go(record, /*changed=*/true);
  }
  return places;
}

}  // namespace tessera
