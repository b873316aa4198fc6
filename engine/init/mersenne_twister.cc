#include "engine/init/mersenne_twister.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "runtime/base/seeded_fault.h"

namespace tessera::mt19937 {
namespace {

constexpr std::uint32_t kMatrix = 0x9908b0df;
constexpr std::uint64_t kDegree = 19937;  // degree of the characteristic polynomial: the bits of the state
constexpr std::size_t kLimbs = (kDegree + 63) / 64;

inline std::uint32_t twist(std::uint32_t from, std::uint32_t to) {
  const std::uint32_t mixed = (from & 0x80000000u) | (to & 0x7fffffffu);
  return (mixed >> 1) ^ (-(to & 1u) & kMatrix);
}

// These types are polynomials over the field of two elements. A sparse polynomial is the list of its exponents in
// descending order. Any other polynomial is an array of bits, with the coefficient of x^k in bit k % 64 of limb k / 64.
using Exponents = std::vector<std::uint64_t>;
using Limbs = std::array<std::uint64_t, kLimbs>;

/// Returns a + b; equal terms cancel.
Exponents sum(const Exponents& a, const Exponents& b) {
  Exponents terms;
  std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(terms), std::greater<>());
  return terms;
}

Exponents product(const Exponents& a, const Exponents& b) {
  Exponents terms;
  for (const std::uint64_t i : b) {
    Exponents shifted = a;
    for (std::uint64_t& exponent : shifted) exponent += i;
    terms = sum(terms, shifted);
  }
  return terms;
}

/// Returns the characteristic polynomial, as section 3.2 of the 1998 paper gives it. It is (x^624 + x^397) q^31 + sum
/// over i < 31 of a_i (x^624 + x^397) q^(30 - i) + a_31, where q = x^623 + x^396. The a_i are the bits of kMatrix.
Exponents characteristic_polynomial() {
  const Exponents first = {kWords, kMiddle}, q = {kWords - 1, kMiddle - 1};
  const auto bit = [](int i) { return (kMatrix >> i & 1u) != 0; };
  Exponents all = bit(31) ? Exponents{0} : Exponents{};
  Exponents term = first;  // this is (x^624 + x^397) q^(30 - i)
  for (int i = 30; i >= 0; --i) {
    if (bit(i)) all = sum(all, term);
    term = product(term, q);
  }
  return sum(all, term);
}

/// Returns all terms of the characteristic polynomial except the first.
const Exponents& lower_terms() {
  static const Exponents kTerms = [] {
    Exponents all = characteristic_polynomial();
    all.erase(all.begin());
    return all;
  }();
  return kTerms;
}

/// Returns the square of a polynomial with 32 coefficients: each coefficient moves to twice its exponent.
inline std::uint64_t spread(std::uint32_t bits) {
  std::uint64_t x = bits;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
  x = (x | x << 2) & 0x3333333333333333;
  return (x | x << 1) & 0x5555555555555555;
}

/// Replaces the polynomial by its remainder modulo the characteristic polynomial. The second term of the characteristic
/// polynomial has a degree 227 lower than the first, so the terms that replace a removed limb lie in lower limbs only.
void reduce(std::vector<std::uint64_t>& limbs) {
  /// x^(kDegree + above) times `bits` equals x^above times the lower terms times `bits`.
  const auto add_lower_terms = [&](std::uint64_t above, std::uint64_t bits) {
    for (const std::uint64_t exponent : lower_terms()) {
      const std::uint64_t to = above + exponent;
      limbs[to / 64] ^= bits << to % 64;
      if (to % 64 != 0) limbs[to / 64 + 1] ^= bits >> (64 - to % 64);
    }
  };
  for (std::size_t limb = limbs.size() - 1; limb >= kLimbs; --limb) {
    if (const std::uint64_t bits = std::exchange(limbs[limb], 0); bits != 0) add_lower_terms(limb * 64 - kDegree, bits);
  }
  constexpr std::size_t kLast = kLimbs - 1;
  const std::uint64_t bits = limbs[kLast] >> kDegree % 64;
  limbs[kLast] ^= bits << kDegree % 64;
  if (bits != 0) add_lower_terms(0, bits);
}

/// Returns x^exponent modulo the characteristic polynomial, computed by squaring.
Limbs power_of_x(std::uint64_t exponent) {
  std::vector<std::uint64_t> limbs(2 * kLimbs + 2, 0), square(limbs.size(), 0);
  limbs[0] = 1;
  for (int bit = 63 - std::countl_zero(exponent | 1); bit >= 0; --bit) {
    for (std::size_t i = 0; i < kLimbs; ++i) {
      square[2 * i] = spread(static_cast<std::uint32_t>(limbs[i]));
      square[2 * i + 1] = spread(static_cast<std::uint32_t>(limbs[i] >> 32));
    }
    std::fill(square.begin() + 2 * kLimbs, square.end(), 0);
    if (exponent >> bit & 1) {
      for (std::size_t i = square.size() - 1; i > 0; --i) square[i] = square[i] << 1 | square[i - 1] >> 63;
      square[0] <<= 1;
    }
    reduce(square);
    limbs.swap(square);
  }
  Limbs power;
  std::copy_n(limbs.begin(), kLimbs, power.begin());
  return power;
}

/// `sums[m]` = the exclusive or of `words[i + m]` over the terms x^i of `polynomial`.
void combine(const Limbs& polynomial, const std::uint32_t* words, Block& sums) {
  constexpr int kTile = 48;  // words whose sums stay in registers
  static_assert(kWords % kTile == 0);
  for (int tile = 0; tile < kWords; tile += kTile) {
    std::array<std::uint32_t, kTile> sum{};
    for (std::size_t limb = 0; limb < kLimbs; ++limb) {
      for (std::uint64_t bits = polynomial[limb]; bits != 0; bits &= bits - 1) {
        const std::uint32_t* const from = words + limb * 64 + std::countr_zero(bits) + tile;
        for (int m = 0; m < kTile; ++m) sum[m] ^= from[m];
      }
    }
    std::copy(sum.begin(), sum.end(), sums.begin() + tile);
  }
}

}  // namespace

void next_block(Block& block) {
  std::uint32_t* const w = block.data();
  for (int i = 0; i < kWords - kMiddle; ++i) w[i] = w[i + kMiddle] ^ twist(w[i], w[i + 1]);
  for (int i = kWords - kMiddle; i < kWords - 1; ++i) w[i] = w[i + kMiddle - kWords] ^ twist(w[i], w[i + 1]);
  w[kWords - 1] = w[kMiddle - 1] ^ twist(w[kWords - 1], w[0]);
}

void jump(Block& block, std::uint64_t blocks) {
  // Every bit of the words behind word 0 follows the recurrence that the characteristic polynomial stands for. Where
  // x^e is the sum of c_i x^i, word 1 + m + e is the sum of c_i times word 1 + m + i. (Only the highest bit of word 0
  // belongs to the state.) Word `blocks * kWords` is word 1 + e.
  const Limbs power = power_of_x(blocks * kWords - (seeded_fault(SeededFault::kJumpOneWordFar) ? 0 : 1));
  constexpr std::size_t kNeeded = kLimbs * 64 + kWords + 1;
  std::vector<std::uint32_t> words;
  words.reserve(kNeeded + kWords);
  Block following = block;
  while (words.size() < kNeeded) {
    words.insert(words.end(), following.begin(), following.end());
    next_block(following);
  }
  combine(power, words.data() + 1, block);
}

}  // namespace tessera::mt19937
