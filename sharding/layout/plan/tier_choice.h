#pragma once

// See docs/glossary.md: tier.

#include <cstdint>

#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// Returns the tier for state of tier "auto" that does not fit into memory: files, except for a GPU whose user names no
/// directories for them.
Tier tier_below(const OffloadConfig& offload, bool is_gpu);

/// Returns `input` with every tier "auto" decided, so that its plan needs at most `limit` bytes and as little as
/// possible lies on `below`: all in memory if that fits; else a share of the moments, in steps of 1/256; else all
/// moments and a share of the masters; else all moments and masters, and a share of the parameters. If `below` is the
/// memory of a GPU's host, and masters and moments are both "auto", both get the same share, so that the host's CPU may
/// update them. If even this does not fit, all state lies on `below`, and the plan shows what is too large.
PlanInput with_tiers_chosen(PlanInput input, std::int64_t limit, Tier below = Tier::kNvme);

}  // namespace tessera
