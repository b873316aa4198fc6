#pragma once

#include <absl/status/statusor.h>

#include <functional>
#include <memory>

#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/rounds/algorithm.h"

namespace tessera {

/// Joins one group, whose calls go as `choose` says; null: directly.
using JoinAndChoose =
    std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group& group, ChooseAlgorithm choose)>;

/// Groups that `join` joins, whose calls choose by what they cost: in the first group of a set of ranks all algorithms are timed, from 512
/// bytes up to 2 MiB or to where a call would take longer than a twentieth of a second, and the ranks fit these times (link_fit.h). Later
/// groups of the same ranks have the same fit. So ranks of one host and ranks of several each choose by their own network. Logged by the
/// group's first rank.
std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group& group)> measured_groups(JoinAndChoose join);

}  // namespace tessera
