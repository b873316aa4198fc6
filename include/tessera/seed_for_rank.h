#pragma once

#include <cstdint>

namespace tessera {

/// Returns the seed for a rank's generator of random numbers that must differ between ranks, such as those of dropout
/// and of data augmentation. If all ranks had one seed, they would drop out the same elements, and change their samples
/// in the same way.
///
///   at::manual_seed(1);                                         // alike: the module's first values
///   tessera::Engine engine(model, strategy, mesh);
///   at::manual_seed(tessera::seed_for_rank(1, mesh.rank()));    // apart: what is drawn while training
///
/// The rule is mix64(seed) + rank modulo 2^64, where mix64 is SplitMix64's finaliser: x ^= x >> 30, x *=
/// 0xbf58476d1ce4e5b9, x ^= x >> 27, x *= 0x94d049bb133111eb, x ^= x >> 31. The seeds of any two ranks of a run
/// therefore differ in the low 32 bits, and LibTorch's CPU generator uses only these bits. The ranks of a run have a
/// range of neighbouring seeds; the ranges of two values of `seed` are unrelated. The rule will not change.
std::uint64_t seed_for_rank(std::uint64_t seed, int rank);

}  // namespace tessera
