#pragma once

#include <absl/status/statusor.h>

#include <functional>
#include <memory>

#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/rounds/algorithm.h"

namespace tessera {

/// Joins one group, whose calls use the algorithms that `choose` returns; null means kDirect.
using JoinAndChoose =
    std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group& group, ChooseAlgorithm choose)>;

/// Returns a function that joins groups with `join`. Calls of these groups choose their algorithm by measured costs.
/// The first group of a set of ranks times all algorithms, from 512 bytes up to 2 MiB. It stops earlier where a call
/// would take longer than a twentieth of a second, or all calls together longer than two seconds. Calls that
/// begin after those two seconds are timed once. The ranks fit these times (link_fit.h). Later groups of the same
/// ranks have the same fit. Ranks of one host, and ranks of several hosts, therefore choose by their own network. The
/// group's first rank logs the fit.
std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group& group)> measured_groups(JoinAndChoose join);

}  // namespace tessera
