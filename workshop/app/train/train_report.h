#pragma once

// See docs/glossary.md: advice.

#include <absl/status/status.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/metrics/metrics.h"
#include "tessera/engine.h"
#include "workshop/app/train/evaluation.h"
#include "workshop/app/train/run_outputs.h"

namespace tessera::app {

/// Returns whether a run reaches a multiple of `every` on its way from `before` steps to `after` steps; false if
/// `every` is 0. The number of steps grows by one, except on a rank that skips some steps (StepResult::missed).
inline bool passes(std::int64_t before, std::int64_t after, std::int64_t every) {
  return every > 0 && after / every > before / every;
}

/// The report of a run on rank 0. It prints a line on stdout every `log_every` steps, and writes an object to the
/// metrics file for every step.
///
///     step   20/300  loss 3.1042  epoch 0.13  norm 1.210  lr 5.00e-04  1830 tok/s  step p50 1.120 s, p95 1.200 s
///       left 5 min 14 s  44.10 MiB = plan                                              (one line)
///
/// ", predicted 1.100 s" follows p95 if a step was predicted. The texts of share_text, data_text, flops_text and
/// straggler_text come next, if they were asked for. A line's loss is the mean of the steps since the previous line,
/// and p50 and p95 are quantiles of the last 100 steps. The other values are those of the line's own step. If
/// "noise_scale" was measured since the previous line, a line of batch_advice follows.
///
/// The metrics file holds a header, then an object for each step and for each evaluation. All carry the run's id:
///
///     {"run":"20261122-082250-9f3c","event":"start","started":"2026-11-22T08:22:50Z","steps":300,...}
///     {"run":"20261122-082250-9f3c","step":1,"epoch":0,"loss":5.54,...}
///     {"run":"20261122-082250-9f3c","event":"evaluation","after_step":100,"eval_loss":3.02,...}
///     {"run":"20261122-082250-9f3c","event":"latency","after_step":100,"call":"gather",...}
///     {"run":"20261122-082250-9f3c","event":"staleness","after_step":100,"0":812,"1":96,...}
///
/// docs/metrics.md lists the fields.
///
/// A table (--metrics NAME.csv) has a row for each step and for each evaluation, with the values of both as columns. An
/// event file (--tensorboard) has the same numbers under their names, and latencies as
/// "latency/gather/blocks.3/p50_seconds". A table has no latencies and no staleness. Neither file has the header.
///
/// If a metrics file can no longer be written, training continues. There is one warning, with the cause, and nothing
/// more is written to the file. `finish` returns the cause again, for the exit code.
class TrainReport {
 public:
  struct Options {
    std::int64_t steps = 0;
    std::int64_t log_every = 10;
    std::int64_t steps_per_epoch = 1;
    RunOutputs outputs;
    bool evaluates = false;              ///< whether the run has evaluations
    double predicted_s = 0;              ///< seconds of a step; 0: nothing was predicted
    double alone_s = 0;                  ///< seconds of a step on one rank, from a profile; 0: there is none
    int ranks = 1;                       ///< ranks of the job
    std::vector<std::string> show = {};  ///< TrainStatus::show
  };

  explicit TrainReport(const Options& options) : options_(options) {}

  /// Creates the metrics files, with a header of run id, start and `about`. Errors: 73 if a file cannot be created, or
  /// is another table (csv_form); 77 if permission is missing; 74 if the header cannot be written.
  absl::Status open(const std::vector<Metric>& about);
  /// Adds a step. `epoch` is the epoch of its last microbatch. `traffic` has the engine's counts after the step.
  void add(const StepResult& result, std::int64_t epoch, const TrafficCounts& traffic);
  /// Adds an evaluation. `traffic` has the engine's counts after the evaluation, since its gathers belong to no step.
  void add(const EvaluationResult& result, std::int64_t after_step, const TrafficCounts& traffic);
  /// Adds latencies: the result of Engine::latencies after the step.
  void add(std::span<const CallLatency> latencies, std::int64_t after_step);
  /// Adds `ages`, which is the result of Engine::staleness after the step. If the histogram has no gradient, nothing is
  /// written.
  void add(const AgeHistogram& ages, std::int64_t after_step);
  /// Prints "final loss 1.9 (mean of the last 10 steps); ...", closes the files, and prints their paths. Returns
  /// error 74 if a metrics file is not complete.
  absl::Status finish(std::optional<double> unigram_entropy);

 private:
  void print(const StepResult& result) const;
  void advise(const StepResult& result);
  /// A metrics file that can still be written.
  struct File {
    std::filesystem::path path;
    MetricsFormat format;
    MetricsWriter writer;
  };
  absl::Status open_file(const std::filesystem::path& path, MetricsFormat format);
  std::vector<std::string> columns() const;
  std::vector<Metric> metrics_of(const StepResult& result, std::int64_t epoch, const TrafficCounts& traffic) const;
  std::string shown_parts(const StepResult& result) const;
  /// Returns the factor by which the ranks do more work per second in this step than the rank of the profile; 0 if
  /// there is no profile.
  double measured_speedup(const StepResult& result) const;
  /// The metrics of one row, for each form of file. If the metrics for a form are missing, that form does not have the
  /// row.
  struct Row {
    std::vector<Metric> line, cells, event;
  };
  void write(const Row& row);

  Options options_;
  std::vector<File> files_;
  absl::Status lost_;  ///< the error after which nothing more is written to a metrics file
  StepTimes times_;
  TrafficCounts before_;      ///< counts after the previous step
  double recent_loss_ = 0.0;  ///< sum of losses since the last line, and number of these losses
  std::int64_t recent_steps_ = 0;
  double last_mean_loss_ = 0.0;
  std::int64_t last_mean_steps_ = 0;
  std::int64_t dropped_ = 0;  ///< StepResult::dropped
  double advised_scale_ = 0;  ///< the noise scale for which advice was printed last
};

/// Returns "44.10 MiB = plan" if both are equal, and otherwise a text with both numbers and their difference.
std::string memory_against_plan(const MemoryUse& allocated, const MemoryUse& planned);

/// Returns a text such as "comm 12.3 %, scaled speed-up 1.88 of 2". It has the share of rank 0's time that is spent in
/// communication, and the scaled speed-up for that share (tessera/scaling.h). ", measured 1.79" follows if
/// `measured_speedup` is above 0.
std::string share_text(double share, int ranks, double measured_speedup = 0);

/// Returns a text such as "data 3.1 % (batches 2.0 %, uploads 0.0 %)". It has the share of rank 0's time in which it
/// waited for data, and the shares that it spent in TokenBatches and in uploads.
std::string data_text(const StepResult& result);

/// Returns a text such as "critical batch about 512 sequences; you use 64: up to 8.0 x as many ranks would pay". The
/// text compares the measured batch with the noise scale, and gives advice (docs/metrics.md).
std::string batch_advice(double noise_scale, double batch);

/// Returns a text for rank 0: "0.412 TFLOP/s", or "412.0 TFLOP/s, MFU 41.6 %" if the device's peak is known.
std::string flops_text(const StepResult& result);

/// Returns "waited for rank 3: 12.0 ms (4.1 %)": StepResult::waited_for_rank, its seconds, and their share of the step.
/// The text is "slowest rank not known" if the rank is not known.
std::string straggler_text(const StepResult& result);

/// Returns a text such as "12 s", "5 min 14 s", "3 h 20 min", "2 d 4 h".
std::string duration_text(double seconds);

}  // namespace tessera::app
