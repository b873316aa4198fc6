#pragma once

#include <cstdint>

#include "benchmarks/native/bench_table.h"

namespace tessera::app {

struct LaunchStudyOptions {
  bool on_gpu = true;        ///< false: on the CPU, where the figures mean nothing
  std::int64_t blocks = 48;  ///< units, besides the root
  int rounds = 7;            ///< each round runs all contenders in turn, each with a model of its own
  int warm_up = 5;           ///< steps of a contender's turn that are not counted; they come first
  int steps = 20;            ///< steps of a contender's turn that are: one sample
};

/// What Tessera costs the host that feeds a GPU, one rank alone: steps of a GPT in bf16 so narrow that the GPU waits for the
/// host. "plain module" is LibTorch without an Engine: the module in bf16, fp32 masters beside it, one fused AdamW over
/// all of them. over_plain_unit_s: what a step takes longer, for each unit.
BenchTable study_launches(const LaunchStudyOptions& options);

}  // namespace tessera::app
