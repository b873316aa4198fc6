#pragma once

#include <cstddef>
#include <vector>

namespace tessera {

/// The order of a buffer's slices in which those of one remainder modulo each power of two are neighbours: first all even ones, of them
/// first those that 4 divides, and so on. So strided slices are one message.
class StridedSlices {
 public:
  /// REQUIRES: slices > 0.
  explicit StridedSlices(std::size_t slices);

  struct Run {
    std::size_t first = 0, count = 0;  ///< places in the order
  };
  /// Where the slices lie that are `remainder` modulo `modulus`, a power of two. REQUIRES: remainder < modulus.
  Run run_of(std::size_t remainder, std::size_t modulus) const;
  /// Which slice lies at each place.
  const std::vector<std::size_t>& order() const { return order_; }

 private:
  void place(std::size_t remainder, std::size_t modulus);

  const std::size_t slices_;
  std::vector<std::size_t> order_;
  std::vector<std::size_t> place_of_;  ///< of each slice
};

}  // namespace tessera
