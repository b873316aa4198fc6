#pragma once

// See docs/glossary.md: unit.

#include <cstdint>

#include "workshop/bench/bench_table.h"

namespace tessera::app {

/// Options of study_launches.
struct LaunchStudyOptions {
  bool on_gpu = true;        ///< false: it runs on the CPU, where the figures mean nothing
  std::int64_t blocks = 48;  ///< number of units, besides the root
  int rounds = 80;           ///< number of rounds; every contender has a turn in each
  int warm_up = 10;          ///< steps of each contender before the first round
  /// Steps of a turn, which is one sample. The steps are few, so that a load on the machine slows all contenders alike.
  int steps = 2;
};

/// Measures the time that Tessera costs the host that feeds a GPU, on a single rank. It times steps of a GPT in bf16
/// that is so narrow that the GPU waits for the host. "plain module" is LibTorch without an Engine: the module in bf16,
/// fp32 masters beside it, one fused AdamW over all of them. over_plain_s: how much longer a step takes than a step of
/// the plain module in the same round (median over rounds); over_plain_unit_s: the same for each unit, and quantiles.
/// It restores LibTorch's number of threads.
BenchTable study_launches(const LaunchStudyOptions& options);

}  // namespace tessera::app
