#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <nlohmann/json.hpp>

#include "runtime/comm/key_value_store.h"

namespace tessera::app {

/// The ranks that take part, and how long they wait.
struct AgreementOptions {
  int rank = 0;
  int world_size = 1;
  double timeout_s = 300;
};

/// Makes sure, before any model code runs, that all ranks will do the same. It is collective over the job's store.
///
/// `prepared` is everything that decides a run (strategy, model, options, ...), or the reason why this rank cannot take
/// part. Each rank compares its values with rank 0's. Every rank gets an error that names
/// the rank that differs or failed, so that no rank waits for it: 78 with the keys that differ; or else its own error
/// on the rank that failed, and 75 on the others. Each rank reads one copy of rank 0's text, and sends one line back.
absl::Status agree(const absl::StatusOr<nlohmann::json>& prepared, const AgreementOptions& options,
                   KeyValueStore& store);

}  // namespace tessera::app
