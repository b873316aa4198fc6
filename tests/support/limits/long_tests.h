#pragma once

#include <cstdlib>
#include <span>

namespace tessera::testing {

/// Returns whether sweeps use all cases (`scripts/test --long`, which sets TESSERA_LONG_TESTS) and not only a sample.
inline bool tests_are_long() { return std::getenv("TESSERA_LONG_TESTS") != nullptr; }

/// Returns all of `values` in long tests, and only the first `sample` values otherwise.
template <class T, std::size_t kSize>
std::span<const T> sampled(const T (&values)[kSize], std::size_t sample) {
  return std::span<const T>(values).first(tests_are_long() ? kSize : sample);
}

}  // namespace tessera::testing
