#pragma once

#include <cstddef>
#include <vector>

namespace tessera {

/// An order of a buffer's slices in which slices with the same remainder modulo a power of two are neighbours. Even
/// slices come first; among them, the slices divisible by 4 come first, and so on. Strided slices can therefore be sent
/// as one message.
class StridedSlices {
 public:
  /// REQUIRES: slices > 0.
  explicit StridedSlices(std::size_t slices);

  struct Run {
    std::size_t first = 0, count = 0;  ///< first place in the order, and number of places
  };
  /// Returns the places of the slices whose index is `remainder` modulo `modulus`, a power of two. REQUIRES: remainder
  /// < modulus.
  Run run_of(std::size_t remainder, std::size_t modulus) const;
  /// Returns the order: the index of the slice at each place.
  const std::vector<std::size_t>& order() const { return order_; }

 private:
  void place(std::size_t remainder, std::size_t modulus);

  const std::size_t slices_;
  std::vector<std::size_t> order_;
  std::vector<std::size_t> place_of_;  ///< [slice]: its place in the order
};

}  // namespace tessera
