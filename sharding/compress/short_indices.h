#pragma once

// See docs/glossary.md: flat group.

#include <absl/status/status.h>

#include <cstdint>
#include <limits>
#include <string>

#include "runtime/base/status.h"

namespace tessera {

/// Returns an error (78) if a flat group has too many elements for indices of 32 bits. Methods of compression with the
/// type `type` send or draw such indices.
inline absl::Status check_short_indices(const std::string& type, std::int64_t numel) {
  if (numel <= std::numeric_limits<std::uint32_t>::max()) return absl::OkStatus();
  return make_error(ExitCode::kConfig, "/compression/method: type " + type +
                                           " has indices of 32 bits, and a unit has " + std::to_string(numel) +
                                           " elements. [T0627] hint: name smaller modules in \"units\"");
}

}  // namespace tessera
