#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Runs `body` on every rank of `control`, and returns the results of all ranks, in rank order. If `body` returned or
/// threw an error on some ranks, all ranks get the error of the first of these ranks. So a rank that fails neither
/// leaves the others waiting nor ends the group. The call is collective. Throws tessera::Error if the group itself
/// fails. `label` names the call in messages.
absl::StatusOr<std::vector<std::string>> share_outcomes(Collectives& control, std::string_view label,
                                                        const std::function<absl::StatusOr<std::string>()>& body);

/// Shares the outcome of work that is done already and whose only result is the status `own`. Returns ok, or the first
/// failure on any rank.
absl::Status share_status(Collectives& control, std::string_view label, const absl::Status& own);

/// Returns the result of `body`, or the status of the exception that `body` throws (status_of).
absl::Status status_from(const std::function<absl::Status()>& body);

}  // namespace tessera
