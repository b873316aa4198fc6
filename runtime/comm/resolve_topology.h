#pragma once

#include <absl/status/statusor.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "tessera/topology.h"

namespace tessera {

/// Looks up an environment variable; returns nothing if it is not set.
using Environment = std::function<std::optional<std::string>(const std::string&)>;
/// Looks variables up in this process's environment.
std::optional<std::string> process_environment(const std::string& name);

/// Names under which Python gives the host and the port of the store of torch.distributed's process group. Ranks meet
/// at this store if they have their numbers only from the process group.
constexpr const char* kProcessGroupStoreHost = "host of torch.distributed's store";
constexpr const char* kProcessGroupStorePort = "port of torch.distributed's store";

/// The name under which Python gives the ranks of each host of a process group, as in "2,3", if hosts have unequal
/// numbers of ranks.
constexpr const char* kProcessGroupHosts = "ranks of each host of torch.distributed";
/// The variable with the number of ranks of each host, as in "2,3". A single number is the number of hosts, for tests.
constexpr const char* kHostsVariable = "TESSERA_HOSTS";

/// Reads the launcher's variables and every other source of this process's rank and world size, and compares them
/// (runtime/comm/launcher_variables.h has the order). If no source has a value, the job has one rank. If the hosts of a
/// process group are unknown, its ranks count as those of one host. Error: 78 if a set of variables is incomplete, a
/// text is no number, rank >= world size, two sources have different values, or ranks do not fill hosts evenly and no
/// source gives the number of ranks of each host (as Slurm and TESSERA_HOSTS=2,3 do). The text names variable, value
/// and launcher.
absl::StatusOr<Topology> resolve_topology(const Environment& environment = process_environment);

/// Returns only the rank and the world size. If resolve_topology fails because a process group's hosts are not known
/// yet, returns the rank and the world size of that process group. Errors are those of resolve_topology.
absl::StatusOr<std::pair<int, int>> resolve_rank(const Environment& environment);

}  // namespace tessera
