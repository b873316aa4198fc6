#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <chrono>
#include <span>
#include <string>

#include "runtime/comm/group.h"
#include "runtime/comm/key_value_store.h"

namespace tessera {

/// Writes to the store that a rank gives up, and why. MeshGroups calls this function. Ranks that wait to make a group
/// with the rank learn of its failure in this way. Only the first rank of a job that gives up is named. `self` is the
/// rank's name, such as "rank 1/4".
void publish_given_up(KeyValueStore& store, const std::string& self, const absl::Status& reason);

/// Writes the number of this rank's process to the store. Other ranks of this host can then see the end of the process,
/// whatever its cause, also before this rank has made a group. Each rank calls this function when it joins the store.
absl::Status publish_process(KeyValueStore& store, int rank);

/// Waits until another rank has set `key`, as KeyValueStore::get does. The wait also ends if a rank gives up meanwhile,
/// or if the process of one of `ranks` ends on this host. `ranks` are the world ranks that must come before a rank can
/// set the key. Errors have exit code 75. absl::IsDeadlineExceeded is true for the error after `timeout`, whose text is
/// not for users. Other errors name a rank that has given up, with its reason, or a rank that has ended, or say that
/// the store is gone.
absl::StatusOr<std::string> get_from_others(KeyValueStore& store, const std::string& key,
                                            std::chrono::milliseconds timeout, std::span<const int> ranks);

inline constexpr const char* kNotAllHaveCome = "not all of its ranks have come in time (comm.init_timeout_s)";

/// Returns once all ranks of the group have called this function. A transport calls this function first, if the
/// transport itself would wait for a missing rank without asking whether the rank has given up. `way` is a prefix of
/// keys that belongs to the transport. The wait takes init_timeout_s at most. Errors are those of get_from_others;
/// texts for users name the group.
absl::Status meet_in_store(const Group& group, const std::string& way, KeyValueStore& store);
/// Does the same for a transport that cannot find out which ranks have not come. The error after the limit then has a
/// text for users, like the other errors.
absl::Status meet_in_store_or_fail(const Group& group, const std::string& way, KeyValueStore& store);

}  // namespace tessera
