#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Runs `body` on every rank of `control`. What every rank got, in rank order; or, the same on every rank, the failure of the first
/// rank that failed: an error that was returned or thrown. So a rank that cannot go on neither leaves the others waiting nor ends the
/// group. Collective; throws tessera::Error where the group itself fails.
absl::StatusOr<std::vector<std::string>> share_outcomes(Collectives& control, std::string_view label,
                                                        const std::function<absl::StatusOr<std::string>()>& body);

/// The same of work that was done already and left no more than `own`: ok on every rank, or the first failure.
absl::Status share_status(Collectives& control, std::string_view label, const absl::Status& own);

/// What `body` returns, or throws (status_of).
absl::Status status_from(const std::function<absl::Status()>& body);

}  // namespace tessera
