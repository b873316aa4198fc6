#pragma once

#include <absl/status/statusor.h>

#include <memory>

#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"

namespace tessera {

/// Makes this rank's side of a group with the `host` transport. The ranks are processes of one host, and communicate
/// through shared memory (SharedMemoryCollectives).
///
/// Every group has one control segment, which its first rank makes. It holds the control blocks and two mailboxes of at
/// least 512 KiB for each rank. Each allocate() makes one more segment for each rank, which its peers map too. Each
/// allocate_common() makes one segment for all ranks, on the first rank. A segment is known as descriptor n of process
/// p and opened as /proc/<p>/fd/<n>. Ranks learn n and p of the control segment from the store, and n and p of all
/// other segments from the control segment. No segment has a name, so nothing is left behind, however a rank ends.
///
/// The call is collective over the group. Errors: 75 if ranks do not come within `group.init_timeout_s` (the message
/// names them), 71 if there is not enough memory, 77 if the processes may not access each other,
/// 69 if they are in different PID namespaces.
absl::StatusOr<std::shared_ptr<Collectives>> host_collectives(const Group& group, KeyValueStore& store);

}  // namespace tessera
