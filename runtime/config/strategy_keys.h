#pragma once

// See docs/glossary.md: placement.

#include <vector>

#include "runtime/config/strategy_table.h"

namespace tessera {

/// The rows of the table, topic by topic; strategy_table.cc puts them together.

std::vector<StrategyKey> sharding_keys();
std::vector<StrategyKey> precision_keys();
std::vector<StrategyKey> step_keys();
std::vector<StrategyKey> optimizer_keys();
std::vector<StrategyKey> ema_keys();
std::vector<StrategyKey> schedule_keys();
std::vector<StrategyKey> platform_keys();
std::vector<StrategyKey> offload_keys();
std::vector<StrategyKey> checkpoint_keys();
std::vector<StrategyKey> spike_keys();
std::vector<StrategyKey> noise_keys();
std::vector<StrategyKey> durable_keys();
std::vector<StrategyKey> compression_keys();
std::vector<StrategyKey> sync_keys();
/// Returns the rules of "sync" and of the keys that it excludes. The other functions, and strategy_rules.cc, have the
/// other rules.
std::vector<StrategyRule> sync_rules();
/// Returns the rules about keys that "compression" needs or excludes.
std::vector<StrategyRule> compression_rules();
/// Returns the rules for an asynchronous "sync".
std::vector<StrategyRule> asynchronous_rules();
/// Returns the rules about keys that "noise_scale" excludes.
std::vector<StrategyRule> noise_rules();
/// Returns the rules of "placement": the axes that it allows, the keys that it excludes, and the placements that go
/// with "secondary".
std::vector<StrategyRule> placement_rules();
/// Returns the rules about keys that "reproducible" excludes.
std::vector<StrategyRule> reproducible_rules();
std::vector<StrategyRule> deal_rules();

/// Largest value of a count, and largest number of bytes.
inline constexpr double kMany = 1e12, kManyBytes = 4611686018427387904.0;

}  // namespace tessera
