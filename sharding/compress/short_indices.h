#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "tessera/error.h"

namespace tessera {

/// Throws tessera::Error (78) where the elements of a flat group have no indices of 32 bits, which the method of compression at `key` sends
/// or draws.
inline void expect_short_indices(const std::string& key, std::int64_t numel) {
  if (numel <= std::numeric_limits<std::uint32_t>::max()) return;
  throw Error(ExitCode::kConfig,
              "/compression/" + key + ": a unit has " + std::to_string(numel) +
                  " elements, and indices are of 32 bits. [T0627] hint: name smaller modules in \"units\"");
}

}  // namespace tessera
