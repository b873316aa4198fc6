#pragma once

#include <absl/status/statusor.h>

#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/collectives.h"

namespace tessera {

/// What each rank of the group gave, in rank order: any bytes, of lengths that may differ. Two all-gathers, the second
/// of the longest length. Errors: those of the group.
absl::StatusOr<std::vector<std::string>> gather_strings(Collectives& group, std::string_view label,
                                                        std::string_view own);

/// `own` of rank `root`, on every rank of the group: any bytes. Two broadcasts, the first of the length. Errors: those of
/// the group.
absl::StatusOr<std::string> broadcast_string(Collectives& group, std::string_view label, std::string_view own,
                                             int root);

}  // namespace tessera
