#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "workshop/bench/disk_speed.h"
#include "workshop/bench/optimizer_bench.h"

namespace tessera {

/// The times of an AdamW step whose moments and low halves of split masters lie on disk. There are also the
/// times of the same step with everything in memory, and of moving the same records without a step. All times are means
/// of three steps in a row, including the beginning and the end of these three.
struct OffloadedStepTiming {
  std::string name;  ///< OptimizerCase::name, followed by " cached" if there is a cache
  std::size_t numel = 0;
  std::int64_t bytes_moved = 0;  ///< bytes that a step reads and writes
  std::size_t memory_bytes = 0;  ///< bytes of records under way, and of records in the cache
  Samples step;                  ///< the whole step, with states on disk
  Samples in_memory;             ///< the update alone, without a disk
  Samples transfer;              ///< the records alone, read and written back
  /// Returns the least possible time of a step with perfect overlap (the longer of its two parts), divided by the time
  /// of the step.
  double of_limit() const;
};

/// Results of bench_offload.
struct OffloadReport {
  std::vector<DiskSpeed> disks;            ///< measured with io_uring, and with threads
  std::vector<OffloadedStepTiming> steps;  ///< steps without a cache, and with a cache if there is one
};

/// Options of bench_offload.
struct OffloadBenchOptions {
  std::string directory;
  std::int64_t bytes = std::int64_t{8} << 30;  ///< bytes that a pass over the disk moves in one direction
  std::size_t numel = std::size_t{64} << 20;   ///< parameters of a step; rounded up to whole records
  std::size_t record_bytes = 2 << 20;
  int queue_depth = 8;
  /// If above 0, steps with a cache are timed too. The cache keeps as many bytes of records in memory as offload.cache
  /// would.
  std::int64_t cache_bytes = 0;
  int rounds = 9;
};

/// Makes the measurements. Errors: those of measure_disk.
absl::StatusOr<OffloadReport> bench_offload(const OffloadBenchOptions& options);

/// Returns JSON with all samples, as `tessera bench offload --json` writes it.
nlohmann::json to_json(const OffloadReport& report);

}  // namespace tessera
