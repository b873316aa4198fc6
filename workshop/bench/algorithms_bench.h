#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/comm/collectives.h"
#include "runtime/comm/rounds/link_fit.h"
#include "runtime/comm/rounds/timed_calls.h"

namespace tessera {

/// Options of bench_algorithms.
struct AlgorithmsBenchOptions {
  std::vector<std::size_t>
      bytes;       ///< bytes that each rank gives: its shard of all_gather, or its input of a reduction; powers of two
  int rounds = 5;  ///< number of rounds over all calls
  std::size_t round_bytes = 4 << 20;  ///< each round makes a call `round_bytes / bytes` times
  int most_calls = 40;                ///< largest number of repeats of a call in a round; at least one is made
};

/// A call with its times in the report.
struct TimedAlgorithm {
  TimedCall call;
  bool is_chosen = false;   ///< whether the fit chooses this algorithm
  bool is_fastest = false;  ///< whether this is the fastest measured algorithm
  double by_fit_s = 0;
};

/// All timed calls, and the fit of their costs.
struct AlgorithmsReport {
  std::string transport;
  int ranks = 0;
  LinkFit fit;
  std::vector<TimedAlgorithm> timings;  ///< timings; those of one collective and size are neighbours

  /// Returns the time of the fit's choice divided by the time of the fastest algorithm, for each collective and size.
  std::vector<double> chosen_of_fastest() const;
};

/// Times every algorithm of every collective of fp32 and bf16, with the algorithms in turn, and fits their costs. `use`
/// sets the algorithm that the calls of `group` take from then on. The call is collective; all ranks return the same
/// report. Errors: those of the group.
absl::StatusOr<AlgorithmsReport> bench_algorithms(Collectives& group, const std::function<void(Algorithm)>& use,
                                                  const AlgorithmsBenchOptions& options);

/// Returns {"transport", "ranks", "fit": {"round_s", "message_s", "byte_s", "add_s"}, "calls": [{"operation", "dtype",
/// "bytes", "algorithm", "median_s", "by_fit_s", "is_chosen", "is_fastest", "samples_ns"}]}
nlohmann::json to_json(const AlgorithmsReport& report);

}  // namespace tessera
