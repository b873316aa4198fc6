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

/// Reads the launcher's variables, in the order torchrun, Slurm, Open MPI, PMI, MVAPICH2; none of them means one rank.
/// Refuses (exit code 78), naming variable, value and launcher: partial sets, non-numbers, rank >= world size,
/// two launchers whose values disagree, ranks that do not fill hosts evenly.
absl::StatusOr<Topology> resolve_topology(const Environment& environment = process_environment);

}  // namespace tessera
