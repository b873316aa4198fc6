#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/comm/call.h"
#include "runtime/comm/mesh_groups.h"
#include "workshop/bench/samples.h"

namespace tessera {

/// The kinds of memory in which a collective's buffers lie.
enum class BenchMemory {
  kPrivate,  ///< memory of the process
  kGroup,    ///< Collectives::allocate
  kCommon,   ///< Collectives::allocate_common: an all-gather in place
};
/// Returns "private", "group" or "common".
std::string_view name_of(BenchMemory memory);

/// Options of bench_collectives.
struct CollectivesBenchOptions {
  /// S, the bytes of the full buffer: `size() * bytes_per_rank` of an all_gather or all_to_all, the input of a
  /// reduce_scatter or all_reduce, `data` of a broadcast. Cases in which a rank would have less than one element are
  /// left out, except those of all_reduce.
  std::vector<std::size_t> bytes;
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16};  ///< types of the sums
  int rounds = 7;                                           ///< number of rounds over all cases
  std::size_t round_bytes = 128 << 20;                      ///< each round calls a case `round_bytes / S` times
  int most_calls = 1000;                                    ///< a case has 1 to this many calls in a round
};

/// One measured case. `dtype` is kU8 if the operation only moves bytes. S is `bytes`, which is 0 for the barrier.
struct CollectiveCase {
  Operation operation = Operation::kBarrier;
  DType dtype = DType::kU8;
  BenchMemory memory = BenchMemory::kPrivate;
  std::size_t bytes = 0;
};

/// The times of one case. A sample is the time of the slowest rank. `limit` has the times of a loop over the same
/// buffers. The loop only reads and writes as many bytes, on all ranks at once (memory_traffic.h). `limit` is empty for
/// a barrier, for common memory, and if a rank's part is less than a cache line.
struct CollectiveTiming {
  CollectiveCase what;
  Samples call, limit;

  /// Returns S / median time, in 1e9 bytes per second.
  double gigabytes_per_s() const;
  /// Returns the median time of the limit / median time of the call; 0 without a limit.
  double of_limit() const;
};

/// The times of all cases.
struct CollectivesReport {
  std::string transport;
  int ranks = 0;
  std::vector<CollectiveTiming> timings;
};

/// Checks the result of every case, then times the cases in rounds over all of them. There is a barrier before each
/// call, except that calls with S up to 16 KiB follow one another without a barrier. All ranks of the mesh call this
/// function, and return the same report. Errors: 70 if a result is wrong, naming the case; those of the transport.
absl::StatusOr<CollectivesReport> bench_collectives(const Mesh& mesh, const CollectivesBenchOptions& options);

/// Returns {"transport", "ranks", "cases": [{"operation", "dtype", "memory", "bytes", "calls", "median_s", "p10_s",
/// "p90_s", "p95_s", "p99_s", "gb_per_s", "limit_s", "of_limit", "samples_ns"}]}; limits are null if there is none.
nlohmann::json to_json(const CollectivesReport& report);

}  // namespace tessera
