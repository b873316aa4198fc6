#pragma once

#include <cstdint>

#include "workshop/bench/bench_table.h"

namespace tessera::app {

struct LaunchStudyOptions {
  bool on_gpu = true;        ///< false: on the CPU, where the figures mean nothing
  std::int64_t blocks = 48;  ///< units, besides the root
  int rounds = 80;           ///< in each, every contender has a turn
  int warm_up = 10;          ///< steps of each contender before the first round
  int steps = 2;             ///< of a turn: one sample. Few, so that what slows the machine for a while slows all alike
};

/// What Tessera costs the host that feeds a GPU, one rank alone: steps of a GPT in bf16 so narrow that the GPU waits for the
/// host. "plain module" is LibTorch without an Engine: the module in bf16, fp32 masters beside it, one fused AdamW over
/// all of them. over_plain_s: what a step takes longer than the plain module's of the same round, the median over rounds; over_plain_unit_s: for
/// each unit, and quantiles. Afterwards LibTorch has as many threads as before.
BenchTable study_launches(const LaunchStudyOptions& options);

}  // namespace tessera::app
