#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/mesh.h"
#include "workshop/bench/alpha_beta.h"
#include "workshop/bench/samples.h"
#include "workshop/bench/studies/bucket_workload.h"

namespace tessera::app {

/// Options of study_buckets.
struct BucketStudyOptions {
  std::vector<double> caps_mb = {0.5, 1, 2, 4, 8, 16, 25, 32, 64};  ///< MiB; buckets of one parameter are timed too
  int rounds = 12;        ///< number of rounds over all buckets, each time with a new Engine
  double budget_s = 105;  ///< seconds for a model: rounds that would exceed this are left out, except the first
  int warm_up_steps = 1;  ///< steps at the beginning that are not counted
  int timed_steps = 4;
  std::vector<std::int64_t> reduction_bytes;      ///< bytes of single reductions, which are timed for the fit
  std::int64_t reduction_round_bytes = 32 << 20;  ///< each round reduces a size `reduction_round_bytes / size` times
  int most_reductions = 40;                       ///< largest number of reductions of a size in a round; at least one
  int held_out_batches = 40;
  ImageSource images;
  bool small_models = false;
};

/// Training under one `units.bucket_cap_mb`.
struct BucketTiming {
  double cap_mb = 0;             ///< 0: one parameter per bucket
  std::int64_t collectives = 0;  ///< reductions in each step
  Samples step;                  ///< forward, backward and update, on the slowest rank
  /// time in reductions for each step, on the rank that waited least, so that waits for late ranks are left out
  Samples communication;
};

/// All-reduces of `bytes` of fp32, in place in the group's memory. Each reduction uses another part of that memory, so
/// that no reduction finds its bytes in a cache (as in a step).
struct ReductionTiming {
  std::int64_t bytes = 0;
  Samples call;  ///< time on the slowest rank
};

/// A forward pass of the trained model over held-out batches, in evaluation mode and without gradients.
struct InferenceTiming {
  double loss = 0, accuracy = 0;  ///< accuracy: the share of targets that the model predicts
  Samples batch;                  ///< forward of one rank's batch, on the slowest rank
};

/// The results with one model.
struct BucketModelReport {
  std::string name, data;
  std::int64_t parameters = 0, tensors = 0;
  double first_loss = 0, last_loss = 0;  ///< training losses: of the first step; mean of the last ten
  BucketTiming per_tensor;
  std::vector<BucketTiming> sweep;
  std::vector<ReductionTiming> reductions;
  AlphaBeta fit;  ///< fitted to the reductions' medians
  InferenceTiming inference;

  int steps_a_round = 1;  ///< timed steps of each bucket in a round

  std::int64_t gradient_bytes() const { return 4 * parameters; }
  /// Returns how many times faster the bucket is than one parameter per bucket. It is the median over rounds, and each
  /// round measures both.
  double step_gain(const BucketTiming& timing) const;
  double communication_gain(const BucketTiming& timing) const;
  /// Returns the bucket of the sweep with the largest step_gain.
  const BucketTiming& best() const;
};

/// Results of study_buckets.
struct BucketReport {
  std::string transport;
  int ranks = 0;
  std::vector<BucketModelReport> models;  ///< the models, such as ResNet-18 and GPT
};

/// Checks that a step gives the same bits under every bucket. Then trains each model under all buckets, one after
/// another, and times the steps. The call is collective; every rank returns the same report. Throws tessera::Error (70)
/// if bits differ.
BucketReport study_buckets(const Mesh& mesh, const BucketStudyOptions& options);

/// The speed-up that the best bucket should reach over one parameter a bucket (issue "Sharding for free", 5).
inline constexpr double kBucketGoal = 1.2;

/// Returns a text for readers: a table of the buckets, which bucket is fastest, by how much and why, single reductions
/// beside their fit, and inference.
std::string to_text(const BucketReport& report);

/// Returns a line for each model and bucket: model, bucket_mib (0: one parameter a bucket), collectives, samples, the
/// step's p50_s, p95_s, p99_s, communication_p50_s, fit_communication_s, and step_gain, communication_gain over one
/// parameter a bucket.
std::string to_csv(const BucketReport& report);

/// Returns JSON in the form that benchmarks/tessera_bench.py describes.
nlohmann::json to_json(const BucketReport& report);

}  // namespace tessera::app
