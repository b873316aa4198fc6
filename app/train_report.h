#pragma once

#include <absl/status/status.h>

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/base/metrics.h"
#include "tessera/engine.h"

namespace tessera::app {

/// What rank 0 says of a run: a line every `log_every` steps on stdout, an object every step in the metrics file.
///
///     step   20/300  loss 3.1042  norm 1.21  lr 5.00e-04  1830 tok/s  step p50 1.12 s, p95 1.20 s  44.10 MiB = plan
class TrainReport {
 public:
  struct Options {
    std::int64_t steps = 0;
    std::int64_t log_every = 10;
    std::string metrics;  ///< file; empty: none
  };

  explicit TrainReport(const Options& options) : options_(options) {}

  /// Creates the metrics file, and its folder. 73, 77.
  absl::Status open();
  /// `epoch`: the one the step's last microbatch came from. `traffic`: the engine's counts after the step.
  absl::Status add(const StepResult& result, std::int64_t epoch, const TrafficCounts& traffic);
  /// "final loss 1.9 (mean of the last 10 steps); ..."; closes the file.
  absl::Status finish(std::optional<double> unigram_entropy);

 private:
  void print(const StepResult& result) const;
  absl::Status write(const StepResult& result, std::int64_t epoch, const TrafficCounts& traffic);

  Options options_;
  std::optional<MetricsWriter> metrics_;
  StepTimes times_;
  TrafficCounts before_;      ///< of the step before
  double recent_loss_ = 0.0;  ///< sum since the last line, and its count
  std::int64_t recent_steps_ = 0;
  double last_mean_loss_ = 0.0;
  std::int64_t last_mean_steps_ = 0;
};

/// "44.10 MiB = plan", or by how much the two differ.
std::string memory_against_plan(const MemoryUse& allocated, const MemoryUse& planned);

}  // namespace tessera::app
