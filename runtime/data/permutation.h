#pragma once

#include <array>
#include <cstdint>

namespace tessera {

/// A shuffle of [0, n) that is computed, not stored. Element i costs a few dozen nanoseconds and no memory, so a run
/// over 10^10 samples can resume anywhere at once. The shuffle is the same on every machine, for ever, since a seed
/// stands for one order. Any thread may use it.
///
/// It is a balanced Feistel network of 10 rounds over the smallest even number of bits b >= 8 with 2^b >= n. Halves
/// have h = b / 2 bits. Round j maps (left, right) to (right, left xor (mix_bits(right + key_j) mod 2^h)) with key_j =
/// mix_bits(mix_bits(mix_bits(seed) + stream) + j), sums modulo 2^64. A result >= n goes through the network again
/// until it is below n ("cycle walking"), at most 4 times on average for n > 64. Any network of this form is a
/// bijection (Luby and Rackoff, "How to construct pseudorandom permutations", 1988).
class Permutation {
 public:
  /// `stream` distinguishes permutations of one seed; it is the epoch. REQUIRES: n <= 2^62.
  Permutation(std::uint64_t n, std::uint64_t seed, std::uint64_t stream);

  std::uint64_t size() const { return n_; }
  /// Returns the element at place i. REQUIRES: i < size().
  std::uint64_t operator()(std::uint64_t i) const;

 private:
  std::uint64_t n_;
  int half_bits_ = 4;
  std::array<std::uint64_t, 10> keys_;
};

}  // namespace tessera
