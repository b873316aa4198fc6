#include "runtime/data/permutation.h"

#include <utility>

#include "runtime/base/noise.h"

namespace tessera {

Permutation::Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t stream) : n_(n) {
  while (half_bits_ < 31 && (std::uint64_t{1} << (2 * half_bits_)) < n) ++half_bits_;
  const std::uint64_t base = mix_bits(mix_bits(seed) + stream);
  for (std::size_t j = 0; j < keys_.size(); ++j) keys_[j] = mix_bits(base + j);
}

std::uint64_t Permutation::operator()(std::uint64_t i) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  do {
    std::uint64_t left = i >> half_bits_, right = i & mask;
    for (const std::uint64_t key : keys_) {
      left ^= mix_bits(right + key) & mask;
      std::swap(left, right);
    }
    i = left << half_bits_ | right;
  } while (i >= n_);
  return i;
}

}  // namespace tessera
