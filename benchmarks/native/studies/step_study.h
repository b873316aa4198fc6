#pragma once

#include <string>
#include <vector>

#include "benchmarks/native/bench_table.h"
#include "benchmarks/native/samples.h"
#include "models/model_config.h"
#include "tessera/mesh.h"
#include "tessera/strategy.h"

namespace tessera::app {

/// What `bench step`, `bench memory` and `bench buckets` train: a GPT of 10.6 million parameters, a sequence a rank;
/// `small`: 0.2 million.
models::GPTConfig studied_gpt(bool small);

/// How a contender is called, and what it trains under. Without a strategy: each rank for itself, all at the same time.
struct Contender {
  std::string name;
  Strategy strategy;
  bool alone = false;
};
/// "no communication", every strategy of a mesh of one dimension, and FULL_SHARD without shared memory.
std::vector<Contender> contenders();

struct StepStudyOptions {
  models::GPTConfig model;
  int rounds = 5;   ///< all contenders are gone through so many times, each with a model and an Engine of its own:
  int warm_up = 3;  ///< steps not counted, then
  int steps = 10;
};

/// One contender's steps.
struct StepTiming {
  std::string name;
  Samples step;                       ///< the slowest rank's
  Samples forward, backward, update;  ///< rank 0's parts of it; `update` is Engine::step
  Samples communication;              ///< rank 0's time in collectives, waiting included, within these parts
};

/// Trains under every contender by turns. Collective; `step` is the same on every rank. All strategies must give the
/// same losses, bit for bit: throws tessera::Error (70) else.
std::vector<StepTiming> study_steps(const Mesh& mesh, const StepStudyOptions& options);

/// Median, p10 and p90 of the step and its parts; exposed communication (the step less that without communication), its
/// fraction of the step, and Gustafson's scaled efficiency (step without communication over the step: every rank brings
/// its own batch, so N ranks do N times the work).
BenchTable to_table(const std::vector<StepTiming>& timings);

}  // namespace tessera::app
