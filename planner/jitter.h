#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

/// A random factor for the time of a piece of work, so that ranks need different times. It is lognormal with mean 1, so
/// it is never negative. It is far above 1 more often than far below 1, as is usual for times of work on computers.
///
/// A factor is a pure function of (seed, step, rank, entry). There is no generator with a state, so a factor does not
/// depend on the order of calls. The four numbers are mixed by the finaliser of SplitMix64 (Steele, Lea and Flood,
/// OOPSLA 2014, section 6). Two uniform numbers are converted to a normal one by the method of Box and Muller (1958).
class Jitter {
 public:
  /// `relative`: the standard deviation of the factors; 0: all factors are exactly 1.
  Jitter(double relative, std::uint64_t seed);

  /// Returns the factor for one piece of work: entry number `entry` of a rank in a step.
  double factor(std::int64_t step, int rank, std::size_t entry) const;
  /// Returns a number above 0 and below 1, evenly distributed, for one step of a rank. It is independent of the
  /// factors.
  double draw(std::int64_t step, int rank) const;

 private:
  std::uint64_t key_of(std::int64_t step, int rank) const;

  const std::uint64_t seed_;
  const double sigma_;  ///< standard deviation of the factor's logarithm
};

}  // namespace tessera
