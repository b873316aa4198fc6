#pragma once

#include <cstdint>
#include <tuple>

#include "tessera/token_options.h"

namespace tessera::python {

/// A SamplerCursor as a row, in the order of python/tessera/_data.py: epoch, consumed, num_samples, seed, shuffle.
using CursorRow = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::uint64_t, bool>;

inline CursorRow row_of(const SamplerCursor& cursor) {
  return {cursor.epoch, cursor.consumed, cursor.num_samples, cursor.seed, cursor.shuffle};
}

inline SamplerCursor cursor_of(const CursorRow& row) {
  const auto& [epoch, consumed, num_samples, seed, shuffle] = row;
  return {epoch, consumed, num_samples, seed, shuffle};
}

}  // namespace tessera::python
