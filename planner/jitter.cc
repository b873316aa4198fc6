#include "planner/jitter.h"

#include <cmath>
#include <numbers>

#include "runtime/base/noise.h"

namespace tessera {
namespace {

constexpr std::uint64_t kStride = 0x9e3779b97f4a7c15u;  // 2^64 divided by the golden ratio

/// Returns a number above 0 and below 1.
double uniform(std::uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

}  // namespace

Jitter::Jitter(double relative, std::uint64_t seed) : seed_(seed), sigma_(std::sqrt(std::log1p(relative * relative))) {}

std::uint64_t Jitter::key_of(std::int64_t step, int rank) const {
  std::uint64_t key = mix_bits(seed_ + kStride);
  key = mix_bits(key + static_cast<std::uint64_t>(step) * kStride);
  return mix_bits(key + static_cast<std::uint64_t>(rank) * kStride);
}

/// Uses the key at place -1, which no factor uses. A factor uses the keys at places 2 * entry and 2 * entry + 1, which
/// are never negative.
double Jitter::draw(std::int64_t step, int rank) const { return uniform(mix_bits(key_of(step, rank) - kStride)); }

double Jitter::factor(std::int64_t step, int rank, std::size_t entry) const {
  if (sigma_ == 0) return 1;
  const std::uint64_t key = key_of(step, rank);
  const double radius = uniform(mix_bits(key + (2 * entry) * kStride));
  const double angle = uniform(mix_bits(key + (2 * entry + 1) * kStride));
  const double normal = std::sqrt(-2 * std::log(radius)) * std::cos(2 * std::numbers::pi * angle);
  return std::exp(sigma_ * normal - sigma_ * sigma_ / 2);
}

}  // namespace tessera
