#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/collectives.h"

namespace tessera {

/// What every rank got, in rank order; or, the same on every rank, the failure of the first one that failed. So a rank that cannot
/// go on neither leaves the others waiting nor ends the group. Collective over `control`; throws tessera::Error where that itself
/// fails.
absl::StatusOr<std::vector<std::string>> share_outcomes(Collectives& control, std::string_view label,
                                                        const absl::StatusOr<std::string>& own);

/// Runs `body`; an exception becomes a status.
absl::Status status_from(const std::function<absl::Status()>& body);

}  // namespace tessera
