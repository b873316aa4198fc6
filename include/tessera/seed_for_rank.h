#pragma once

#include <cstdint>

namespace tessera {

/// What a rank seeds its generator with for what must differ between ranks: dropout, augmentation of data. With one seed on
/// all ranks, the samples of all ranks would be dropped out and turned alike.
///
///   at::manual_seed(1);                                         // alike: the module's first values
///   tessera::Engine engine(model, strategy, mesh);
///   at::manual_seed(tessera::seed_for_rank(1, mesh.rank()));    // apart: what is drawn while training
///
/// The rule: mix64(seed) + rank modulo 2^64, where mix64 is SplitMix64's finaliser:
/// x ^= x >> 30, x *= 0xbf58476d1ce4e5b9, x ^= x >> 27, x *= 0x94d049bb133111eb, x ^= x >> 31.
/// So any two ranks of a run differ in the low 32 bits, which are all that LibTorch's generator of the CPU takes; and
/// seeds that are neighbours give ranges of seeds that have nothing to do with each other. The rule will not change.
std::uint64_t seed_for_rank(std::uint64_t seed, int rank);

}  // namespace tessera
