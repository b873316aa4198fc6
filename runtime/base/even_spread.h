#pragma once

#include <cstdint>

namespace tessera {

/// Chooses k of n items in a row, spread evenly: floor(i k / n) of the first i items are chosen. A loop over the row,
/// in either direction, therefore visits chosen items and others in a nearly constant proportion. An EvenSpread is a
/// plain value.
class EvenSpread {
 public:
  EvenSpread() = default;
  /// Chooses `chosen` of `all` items: as many as possible among the first `first` items, and the rest among the other
  /// items. The choice is spread evenly over each of these two parts. REQUIRES: 0 <= chosen, first <= all < 2^31.
  EvenSpread(std::int64_t all, std::int64_t chosen, std::int64_t first)
      : of_first_{first, chosen < first ? chosen : first},
        of_others_{all - first, chosen < first ? 0 : chosen - first} {}

  /// Returns the number of chosen items among the items 0 to i - 1. REQUIRES: 0 <= i <= all.
  std::int64_t chosen_before(std::int64_t i) const {
    return i <= of_first_.all ? of_first_.before(i) : of_first_.chosen + of_others_.before(i - of_first_.all);
  }
  bool has(std::int64_t i) const { return chosen_before(i + 1) > chosen_before(i); }
  /// Returns the index of item i, from 0, among the chosen items if it is chosen, or else among the others.
  std::int64_t index(std::int64_t i) const { return has(i) ? chosen_before(i) : i - chosen_before(i); }

 private:
  struct Part {
    std::int64_t all = 0, chosen = 0;
    std::int64_t before(std::int64_t i) const { return all == 0 ? 0 : i * chosen / all; }
  };
  Part of_first_, of_others_;
};

}  // namespace tessera
