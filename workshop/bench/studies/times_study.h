#pragma once

#include <string>
#include <vector>

#include "tessera/mesh.h"
#include "workshop/bench/bench_table.h"
#include "workshop/models/model_config.h"

namespace tessera::app {

/// A model that study_times trains, with one sequence a rank.
struct TimesCase {
  std::string name;
  models::GPTConfig model;
  int steps = 10;  ///< steps of a turn that are counted
};
/// Returns 24 layers of width 64, with short steps, and a GPT of 69 million parameters; `small`: two such layers.
std::vector<TimesCase> times_cases(bool small);

/// Measures the cost of timing for a steady step. Under FULL_SHARD, with one copy of the
/// parameters on a host and with private copies, these take turns in every round:
///
///   nothing told            no latencies, and no listener for ranges; the wait for data is not measured, except with
///                           private copies, whose operators are watched in any case
///   nothing told, another   the same with another Engine: shows how far two equal Engines differ
///   ranges                  each range asks whether a profiler is attached, and none is: every program has this cost
///   all                     ranges, the wait for data (Engine::time_data) and latencies (Engine::time_calls)
///   all, with a profiler    an observer of LibTorch is attached, which counts ranges
///
/// Floating-point operations are counted in an Engine's first step, which is never among those that are timed.
/// over_plain_fraction: the median over rounds of how much longer the step takes than the step of "nothing told" in the
/// same round. It is collective; a step's time is that of the slowest rank.
BenchTable study_times(const Mesh& mesh, const std::vector<TimesCase>& cases, int rounds);

}  // namespace tessera::app
