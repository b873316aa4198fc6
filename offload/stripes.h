#pragma once

#include <cstdint>
#include <span>

namespace tessera {

/// Which of several files holds which record, such that each file gets a share in proportion to its weight, and any run of
/// records is spread in nearly the same proportion: so all disks work at once. A function of weights and numbers alone.
///
/// Record r goes to the file that is furthest behind its share of the first r + 1 records; of equals, the first one.
struct StripePlace {
  std::int32_t file = 0;
  std::int64_t index = 0;  ///< the record is the index-th of that file, from 0
};

/// REQUIRES: `weights` are finite and more than 0; `places` has one for each record.
void place_in_stripes(std::span<const double> weights, std::span<StripePlace> places);

}  // namespace tessera
