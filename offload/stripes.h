#pragma once

#include <cstdint>
#include <span>

namespace tessera {

/// The place of a record in one of several files. Each file gets a share of the records in proportion to its weight.
/// Any sequence of consecutive records is spread in nearly the same proportion, so that all disks work at the same
/// time. The result depends only on the weights and the records' numbers.
///
/// Record r is put into the file whose number of records is furthest below its share of the first r + 1 records. If
/// there are several such files, it is put into the first of them.
struct StripePlace {
  std::int32_t file = 0;
  std::int64_t index = 0;  ///< the record's position among the records of that file, from 0
};

/// Fills `places` with the place of each record.
/// REQUIRES: `weights` are finite and more than 0; `places` has one entry for each record.
void place_in_stripes(std::span<const double> weights, std::span<StripePlace> places);

}  // namespace tessera
