#include "optim/noise.h"

namespace tessera {
namespace {

// A bijection of 64 bits in which every input bit reaches every output bit: the finaliser of SplitMix64 (Steele, Lea
// and Flood, OOPSLA 2014, section 6).
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr std::uint64_t kSeed = 0x9e3779b97f4a7c15u;  // 2^64 over the golden ratio

}  // namespace

NoiseKey noise_key(std::uint64_t stream, std::int64_t step) {
  const std::uint64_t key = mix(mix(stream + kSeed) + static_cast<std::uint64_t>(step) * kSeed);
  return {.start = static_cast<std::uint32_t>(key), .twist = static_cast<std::uint32_t>(key >> 32)};
}

}  // namespace tessera
