#pragma once

#include <absl/status/statusor.h>

#include <memory>

#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"

namespace tessera {

/// The `host` transport: ranks that are processes of one host, over shared memory (SharedMemoryCollectives).
///
/// One control segment a group, made by its first rank, holds the control blocks and two mailboxes of 1 MiB a
/// rank; each allocate() makes one more segment a rank, which its peers map too, and each allocate_common() one
/// for all, made by the first rank. Segments are found as
/// descriptor n of process p, through the store (control) or the control segment (all others), and opened by
/// /proc/<p>/fd/<n>. None has a name, so nothing is left behind however a rank ends.
///
/// Collective over the group. Errors: 75 naming the ranks that did not come within `group.init_timeout_s`, 71
/// without memory, 77 where processes may not see each other.
absl::StatusOr<std::shared_ptr<Collectives>> host_collectives(const Group& group, KeyValueStore& store);

}  // namespace tessera
