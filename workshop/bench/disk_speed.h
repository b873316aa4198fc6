#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "offload/io/io_ring.h"
#include "workshop/bench/samples.h"

namespace tessera {

/// The options of measure_disk.
struct DiskSpeedOptions {
  std::string directory;
  std::int64_t bytes = std::int64_t{1} << 30;  ///< size of the scratch file; rounded up to whole records
  std::size_t record_bytes = 2 << 20;          ///< a multiple of 4096
  int in_flight = 16;                          ///< number of records at once
  int rounds = 3;
  IoEngine engine = IoEngine::kBest;
};

/// Passes over the file, one after the other. Each pass reads or writes every record once.
struct DiskPasses {
  Samples time;
  Samples cpu;  ///< CPU time of all threads of the process, in the kernel and outside
};

/// The times of all passes.
struct DiskSpeed {
  std::int64_t bytes = 0;  ///< bytes that a pass moves in one direction
  std::string file_mode;   ///< BlockFile::mode
  std::string engine;      ///< IoRing::describe
  DiskPasses write, read;
  DiskPasses mixed;  ///< each record is read and written back, as in an update of states

  /// These functions return the rates of the median pass. The mixed rate counts the bytes of both directions together.
  double write_bytes_per_s() const { return static_cast<double>(bytes) / write.time.median_s(); }
  double read_bytes_per_s() const { return static_cast<double>(bytes) / read.time.median_s(); }
  double mixed_bytes_per_s() const { return 2 * static_cast<double>(bytes) / mixed.time.median_s(); }
};

/// Measures how fast a directory's disk moves records, in the same way as offload moves them. The function uses a
/// private scratch file that is removed afterwards. Errors: those of BlockFile::create and IoRing::make.
absl::StatusOr<DiskSpeed> measure_disk(const DiskSpeedOptions& options);

}  // namespace tessera
