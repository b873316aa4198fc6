#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "planner/predicted_step.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"
#include "workshop/app/plan/plan_time.h"
#include "workshop/models/language_model.h"

namespace tessera::app {

/// A strategy, the memory that a rank needs with it, and the predicted step.
struct TriedStrategy {
  Strategy strategy;
  std::int64_t bytes = 0;  ///< bytes that "memory.limit" limits (MemoryUse::limited)
  bool fits = true;        ///< bytes are within Strategy::memory.limit_bytes
  PredictedStep step;

  /// Returns the seconds by which strategies are compared: those of one microbatch, since a step of more microbatches
  /// trains on more data.
  double seconds_a_microbatch() const { return step.seconds / static_cast<double>(strategy.gradient_accumulation); }
};

/// Returns all strategies that differ from `like` only in time, memory and bits on the wire. They have each
/// ShardingStrategy that the other keys allow, several numbers of units gathered ahead, and each number of microbatches
/// in `accumulations` (empty: the number of `like`). If ranks are on several hosts and `like` does not compress
/// gradients, strategies that compress gradients are also returned. Strategies that fit into memory come first, in
/// order of time. Throws tessera::Error: 65 if `files` are of another model; 78 if `like` allows no strategy.
std::vector<TriedStrategy> try_strategies(const models::ModelConfig& config, const Strategy& like,
                                          const Topology& topology, const TimingFiles& files,
                                          std::span<const std::int64_t> accumulations);

/// Returns a text that lists the fastest strategies, what bounds the time of each, and which is the fastest that fits.
/// REQUIRES: `tried` is not empty.
std::string to_text(std::span<const TriedStrategy> tried);
nlohmann::ordered_json to_json(std::span<const TriedStrategy> tried);

}  // namespace tessera::app
