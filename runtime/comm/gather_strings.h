#pragma once

#include <absl/status/statusor.h>

#include <string>
#include <string_view>
#include <vector>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Returns what each rank of the group gave, in rank order: any bytes, of lengths that may differ. It makes two
/// all-gathers, and each rank sends as many bytes in the second one as the longest string has. Errors are those of the
/// group.
absl::StatusOr<std::vector<std::string>> gather_strings(Collectives& group, std::string_view label,
                                                        std::string_view own);

/// Returns `own` of rank `root` on every rank of the group: any bytes. It makes two broadcasts, and the first one sends
/// the length. Errors are those of the group.
absl::StatusOr<std::string> broadcast_string(Collectives& group, std::string_view label, std::string_view own,
                                             int root);

}  // namespace tessera
