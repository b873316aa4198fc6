#pragma once

#include <absl/status/statusor.h>

#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Returns the string that each rank of the group gave, in rank order. Strings may have any bytes and different
/// lengths. The call makes two all-gathers. In the second all-gather, each rank sends as many bytes as the longest
/// string has. Errors are those of the group.
absl::StatusOr<std::vector<std::string>> gather_strings(Collectives& group, std::string_view label,
                                                        std::string_view own);

/// Returns `own` of rank `root` on every rank of the group. The string may have any bytes. The call makes two
/// broadcasts: the first sends the length, the second the string. Errors are those of the group.
absl::StatusOr<std::string> broadcast_string(Collectives& group, std::string_view label, std::string_view own,
                                             int root);

}  // namespace tessera
