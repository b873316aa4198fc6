#pragma once

#include <cstdint>
#include <span>

namespace tessera {

/// Says which of several files holds which record. Each file gets a share in proportion to its weight, and any run of
/// records is spread in nearly the same proportion, so that all disks work at once. The result depends on the weights
/// and the records' numbers alone.
///
/// Record r is in the file that is furthest behind its share of the first r + 1 records; it is the first such file if
/// several are.
struct StripePlace {
  std::int32_t file = 0;
  std::int64_t index = 0;  ///< the record is the index-th of that file, from 0
};

/// Fills `places`.
/// REQUIRES: `weights` are finite and more than 0; `places` has one entry for each record.
void place_in_stripes(std::span<const double> weights, std::span<StripePlace> places);

}  // namespace tessera
