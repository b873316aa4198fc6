#pragma once

#include <absl/status/statusor.h>

#include <cstddef>
#include <functional>
#include <limits>
#include <memory>

#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/rounds/algorithm.h"

namespace tessera {

/// Joins one group, whose calls use the algorithms that `choose` returns; null means kDirect.
using JoinAndChoose =
    std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group& group, ChooseAlgorithm choose)>;

/// Decides which sets of ranks measure their network, and how long they may measure.
struct MeasureRule {
  /// Returns whether the ranks of a group may measure. The result must be the same on all of these ranks. If the
  /// function is null, every set measures.
  std::function<bool(const Group& group)> may_measure = nullptr;
  /// Limit in seconds for all sets of ranks of this process together. A set of ranks first estimates the time that it
  /// needs, and measures only if its ranks have that much time left. If the limit is infinite, no estimate is made, and
  /// each set of ranks has two seconds of its own.
  double most_seconds = std::numeric_limits<double>::infinity();
  std::size_t least_bytes = 0;  ///< calls in which a rank gives fewer bytes use kDirect
};

/// Returns a function that joins groups with `join`. Calls of these groups choose their algorithm by measured costs.
/// The first group of a set of ranks times all algorithms, from 512 bytes up to 2 MiB. It stops earlier if a call would
/// take longer than a twentieth of a second, or if all calls together would take longer than their limit. Calls that
/// begin after that limit are timed once. The ranks fit these times (link_fit.h). Later groups of the same ranks have
/// the same fit. Ranks of one host, and ranks of several hosts, therefore choose by their own network. The group's
/// first rank logs the fit, or the reason why nothing was measured; calls then use kDirect.
std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group& group)> measured_groups(
    JoinAndChoose join, const MeasureRule& rule = {});

}  // namespace tessera
