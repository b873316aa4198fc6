#include "runtime/comm/rounds/strided_slices.h"

#include <algorithm>

namespace tessera {

StridedSlices::StridedSlices(std::size_t slices) : slices_(slices) { place(0, 1); }

void StridedSlices::place(std::size_t remainder, std::size_t modulus) {
  if (remainder >= slices_) return;
  if (remainder + modulus >= slices_) return order_.push_back(remainder);
  place(remainder, 2 * modulus);
  place(remainder + modulus, 2 * modulus);
}

StridedSlices::Run StridedSlices::run_of(std::size_t remainder, std::size_t modulus) const {
  if (remainder >= slices_) return {};
  const auto first =
      std::find_if(order_.begin(), order_.end(), [&](std::size_t slice) { return slice % modulus == remainder; });
  return {static_cast<std::size_t>(first - order_.begin()), (slices_ - remainder + modulus - 1) / modulus};
}

}  // namespace tessera
