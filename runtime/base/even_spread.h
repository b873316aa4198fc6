#pragma once

#include <cstdint>

namespace tessera {

/// Some of the things in a row, k chosen of n, evenly spread over it: of the first i, floor(i k / n) are chosen. So whoever goes through the
/// row, in either direction, meets the chosen ones and the others in a steady mix.
class EvenSpread {
 public:
  EvenSpread() = default;
  /// Chooses `chosen` of `all`: of the `first` ones as many as there are, and of the others the rest. Each of the two is spread evenly.
  /// REQUIRES: 0 <= chosen, first <= all < 2^31.
  EvenSpread(std::int64_t all, std::int64_t chosen, std::int64_t first)
      : of_first_{first, chosen < first ? chosen : first},
        of_others_{all - first, chosen < first ? 0 : chosen - first} {}

  /// Of 0 to i - 1, how many are chosen. REQUIRES: 0 <= i <= all.
  std::int64_t chosen_before(std::int64_t i) const {
    return i <= of_first_.all ? of_first_.before(i) : of_first_.chosen + of_others_.before(i - of_first_.all);
  }
  bool has(std::int64_t i) const { return chosen_before(i + 1) > chosen_before(i); }
  /// The number of i among its kind, the chosen or the others, from 0.
  std::int64_t index(std::int64_t i) const { return has(i) ? chosen_before(i) : i - chosen_before(i); }

 private:
  struct Part {
    std::int64_t all = 0, chosen = 0;
    std::int64_t before(std::int64_t i) const { return all == 0 ? 0 : i * chosen / all; }
  };
  Part of_first_, of_others_;
};

}  // namespace tessera
