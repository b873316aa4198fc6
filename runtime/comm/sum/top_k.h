#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

/// Writes the indices of the `count` numbers of `values` [numel] with the largest magnitudes to `indices` [count], in
/// ascending order. The lower index wins among equal magnitudes. A NaN counts as larger than an infinity. REQUIRES:
/// count <= numel < 2^32.
void select_largest(const float* values, std::size_t numel, std::size_t count, std::uint32_t* indices);

/// Returns whether none of `values` is an infinity or a NaN.
bool all_finite(const float* values, std::size_t numel);

}  // namespace tessera
