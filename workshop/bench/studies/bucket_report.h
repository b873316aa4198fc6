#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "workshop/bench/studies/bucket_study.h"

namespace tessera::app {

/// The speed-up that the best bucket should reach over one parameter a bucket (issue "Sharding for free", 5).
inline constexpr double kBucketGoal = 1.2;

/// Returns a text for readers: a table of the buckets, which one wins, by how much and why, single reductions beside
/// their fit, and inference.
std::string to_text(const BucketReport& report);

/// Returns a line for each model and bucket: model, bucket_mib (0: one parameter a bucket), collectives, samples, the
/// step's p50_s, p95_s, p99_s, communication_p50_s, fit_communication_s, and step_gain, communication_gain over one
/// parameter a bucket.
std::string to_csv(const BucketReport& report);

/// Returns JSON in the form that benchmarks/tessera_bench.py describes.
nlohmann::json to_json(const BucketReport& report);

}  // namespace tessera::app
