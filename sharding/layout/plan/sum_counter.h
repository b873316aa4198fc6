#pragma once

#include <bit>
#include <cstdint>

namespace tessera {

/// How a rank adds up the sums of its `rounds` microbatches as the pairwise tree (collectives.h rule 3) does, while
/// they come one after the other: a binary counter. Level l holds the sum of 2^l neighbours that waits for the next
/// 2^l. A new sum joins the levels that a carry goes through, from the lowest on, and waits on the level behind them;
/// the last one joins all that wait, and is the total. The most sums that wait at a time is the number of binary digits
/// of `rounds` - 1.
///
/// MemoryPlan has the memory of the levels, and Reducer adds. REQUIRES: rounds > 0.
class SumCounter {
 public:
  /// `levels` of as many rounds as a strategy may have (gradient_accumulation, at most 10^6).
  static constexpr int kMostLevels = 20;

  explicit SumCounter(std::int64_t rounds) : rounds_(static_cast<std::uint64_t>(rounds)) {}

  /// The most sums that wait at a time: 0 for one round, 1 for two, 2 for four.
  int levels() const { return std::bit_width(rounds_ - 1); }
  bool is_last(std::int64_t round) const { return static_cast<std::uint64_t>(round) + 1 == rounds_; }
  /// The levels whose sums join the sum of `round`, as bits. They join from the lowest level upwards.
  std::uint64_t joined(std::int64_t round) const {
    const auto digits = static_cast<std::uint64_t>(round);
    return is_last(round) ? digits : digits & ~(digits + 1);
  }
  /// The level on which the joined sum waits. REQUIRES: !is_last(round).
  int place(std::int64_t round) const { return std::popcount(joined(round)); }

 private:
  std::uint64_t rounds_;
};

}  // namespace tessera
