#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// The options of path_weights.
struct PathSpeedOptions {
  std::string who = {};                ///< text in front of errors: "rank 0"
  std::size_t record_bytes = 4 << 20;  ///< size of a record, which is moved at once; a multiple of 4096
  int records = 8;                     ///< number of records that are written, and then read, in each directory
};

/// Measures the relative speed of the disks of several directories, for StripePath::weight. Each directory gets a
/// private scratch file, whose records are written and then read past the page cache where that is possible; nothing is
/// left of it.
///
/// The result is 1 for the fastest, and for all others their share of its bandwidth in steps of an eighth, from 1/8 on.
/// Disks that reach 0.85 of the fastest one's bandwidth count as equal to it, since a measurement of 64 MiB is not more
/// exact than that. A single directory is not measured. Errors: those of BlockFile::create and IoRing.
absl::StatusOr<std::vector<double>> path_weights(std::span<const std::string> directories,
                                                 const PathSpeedOptions& options);

}  // namespace tessera
