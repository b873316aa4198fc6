#pragma once

#include <absl/status/statusor.h>

#include <functional>
#include <optional>
#include <string>

#include "tessera/topology.h"

namespace tessera {

using Environment = std::function<std::optional<std::string>(const std::string&)>;
/// Looks variables up in this process's environment.
std::optional<std::string> process_environment(const std::string& name);

/// Where the store of a process group of torch.distributed is served, which ranks meet at if the group alone says who they are.
constexpr const char* kProcessGroupStoreHost = "host of torch.distributed's store";
constexpr const char* kProcessGroupStorePort = "port of torch.distributed's store";

/// Reads the launcher's variables and what else says who this process is, and compares them (runtime/comm/launcher_variables.h has the
/// order); nothing said means one rank. Without the hosts of a process group, ranks count as those of one host.
/// Refuses (exit code 78), naming variable, value and launcher: partial sets, non-numbers, rank >= world size,
/// two whose values disagree, ranks that do not fill hosts evenly.
absl::StatusOr<Topology> resolve_topology(const Environment& environment = process_environment);

}  // namespace tessera
