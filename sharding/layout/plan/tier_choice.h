#pragma once

// See docs/glossary.md: tier.

#include <cstdint>

#include "sharding/layout/plan/plan_input.h"

namespace tessera {

/// Returns the tier for state with tier "auto" that does not fit into memory. This tier is nvme, or host if a GPU
/// trains and the user names no directories.
Tier tier_below(const OffloadConfig& offload, bool is_gpu);

/// Returns `input` with every tier "auto" decided, so that its plan needs at most `limit` bytes and as little as
/// possible lies on `below`. If everything fits into memory, all state stays there. Otherwise a fraction of the moments
/// is offloaded, in steps of 1/256. If that is not enough, all moments and a fraction of the masters are offloaded. If
/// that is still not enough, all moments, all masters and a fraction of the parameters are offloaded. If `below` is the
/// memory of a GPU's host, and masters and moments are both "auto", both get the same fraction. The host's CPU may then
/// update them. If even this does not fit, all state lies on `below`, and the plan shows what is too large.
PlanInput with_tiers_chosen(PlanInput input, std::int64_t limit, Tier below = Tier::kNvme);

}  // namespace tessera
