#pragma once

#include <absl/status/statusor.h>

#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Returns the string that each rank of the group gave, in rank order. Strings may have any bytes and different
/// lengths. It makes two all-gathers. Each rank sends as many bytes in the second one as the longest string has. Errors
/// are those of the group.
absl::StatusOr<std::vector<std::string>> gather_strings(Collectives& group, std::string_view label,
                                                        std::string_view own);

/// Returns `own` of rank `root` on every rank of the group. The string may have any bytes. It makes two broadcasts, and
/// the first one sends the length. Errors are those of the group.
absl::StatusOr<std::string> broadcast_string(Collectives& group, std::string_view label, std::string_view own,
                                             int root);

}  // namespace tessera
