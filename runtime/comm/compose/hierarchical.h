#pragma once

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Collectives over H hosts of L ranks each, made from two smaller groups: `inside` has the L ranks of this host, and
/// `across` has the H ranks (one on each host) with this local rank. A rank's number is host * L + place, where host =
/// across->rank() and place = inside->rank().
///
/// The traffic between hosts is the traffic of the smaller group: each rank sends 1/L of the bytes that it would send
/// without `inside`. Sums are added inside hosts first, then across hosts. They have the same bits as sums of the flat
/// pairwise tree whenever L is a power of two (collectives.h rule 3).
///
/// allocate() gives memory of `inside`. A thread of the group makes all-gathers, and reductions with Waits::kLater
/// (working_in_background). All other calls run on the caller's thread and are done when they return.
std::shared_ptr<Collectives> hierarchical_collectives(std::shared_ptr<Collectives> inside,
                                                      std::shared_ptr<Collectives> across);

}  // namespace tessera
