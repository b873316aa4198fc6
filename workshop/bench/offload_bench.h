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

/// An AdamW step whose masters (what parameters lack of them) and moments lie on disk, beside the same step with all in
/// memory, and beside the same records moved without a step. All are means of three in a row, the beginning and the end of the three included.
struct OffloadedStepTiming {
  std::string name;  ///< OptimizerCase::name; with " cached" where there is a cache
  std::size_t numel = 0;
  std::int64_t bytes_moved = 0;  ///< of a step: read and written
  std::size_t memory_bytes = 0;  ///< of records: those on their way, and those in the cache
  Samples step;                  ///< with states on disk
  Samples in_memory;             ///< the update alone
  Samples transfer;              ///< the records alone, read and written back
  /// What no overlap can beat: the longer of the two parts, over the step.
  double of_limit() const;
};

struct OffloadReport {
  std::vector<DiskSpeed> disks;            ///< by io_uring, and by threads
  std::vector<OffloadedStepTiming> steps;  ///< without a cache, and where there is one, with it
};

struct OffloadBenchOptions {
  std::string directory;
  std::int64_t bytes = std::int64_t{8} << 30;  ///< that a pass over the disk moves one way
  std::size_t numel = std::size_t{64} << 20;   ///< of a step; rounded up to whole records
  std::size_t record_bytes = 2 << 20;
  int queue_depth = 8;
  std::int64_t cache_bytes =
      0;  ///< > 0: steps with a cache, too: as many bytes of records stay in memory, as those of offload.cache do
  int rounds = 9;
};

/// Errors: those of measure_disk.
absl::StatusOr<OffloadReport> bench_offload(const OffloadBenchOptions& options);

nlohmann::json to_json(const OffloadReport& report);

}  // namespace tessera
