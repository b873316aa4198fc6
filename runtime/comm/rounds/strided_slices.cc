#include "runtime/comm/rounds/strided_slices.h"

namespace tessera {

StridedSlices::StridedSlices(std::size_t slices) : slices_(slices) {
  place(0, 1);
  place_of_.resize(slices);
  for (std::size_t place = 0; place < slices; ++place) place_of_[order_[place]] = place;
}

void StridedSlices::place(std::size_t remainder, std::size_t modulus) {
  if (remainder >= slices_) return;
  if (remainder + modulus >= slices_) return order_.push_back(remainder);
  place(remainder, 2 * modulus);
  place(remainder + modulus, 2 * modulus);
}

StridedSlices::Run StridedSlices::run_of(std::size_t remainder, std::size_t modulus) const {
  if (remainder >= slices_) return {};
  return {place_of_[remainder], (slices_ - remainder + modulus - 1) / modulus};  // the smallest slice comes first
}

}  // namespace tessera
