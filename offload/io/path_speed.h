#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// The options of path_weights.
struct PathSpeedOptions {
  std::string who = {};                ///< text at the beginning of errors: "rank 0"
  std::size_t record_bytes = 4 << 20;  ///< size in bytes of a record, which one transfer moves; a multiple of 4096
  int records = 8;                     ///< number of records that are first written and then read in each directory
};

/// Measures the relative speeds of the disks of several directories, for StripePath::weight. The function makes a
/// temporary scratch file in each directory, writes its records, and then reads them, past the page cache if possible.
/// It removes the file afterwards.
///
/// The result is 1 for the fastest disk. For every other disk it is the disk's bandwidth divided by that of the fastest
/// disk, rounded to an eighth, and at least 1/8. Disks with at least 0.85 of the fastest disk's bandwidth get 1 too,
/// since a measurement with 64 MiB is not more exact than that. A single directory is not measured. Errors: those of
/// BlockFile::create and IoRing.
absl::StatusOr<std::vector<double>> path_weights(std::span<const std::string> directories,
                                                 const PathSpeedOptions& options);

}  // namespace tessera
