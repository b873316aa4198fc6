#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <nlohmann/json.hpp>

#include "runtime/comm/key_value_store.h"

namespace tessera::app {

/// The ranks that take part, and the time that they wait.
struct AgreementOptions {
  int rank = 0;
  int world_size = 1;
  double timeout_s = 300;
};

/// Makes sure, before any code of the model runs, that all ranks will do the same. The call is collective; ranks
/// exchange texts through the job's store.
///
/// `prepared` has everything that decides a run (strategy, model, options, ...), or the reason why this rank cannot
/// take part. Each rank compares its values with rank 0's. If a rank differs or failed, every rank gets an error that
/// names that rank, so that no rank waits for it. A rank that failed gets its own error, and the other ranks then get
/// 75. If no rank failed and values differ, the code is 78, with the keys that differ. Each rank reads one copy of rank
/// 0's text, and sends one line back.
absl::Status agree(const absl::StatusOr<nlohmann::json>& prepared, const AgreementOptions& options,
                   KeyValueStore& store);

}  // namespace tessera::app
