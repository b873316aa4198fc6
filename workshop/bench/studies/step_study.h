#pragma once

#include <string>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/strategy.h"
#include "workshop/bench/bench_table.h"
#include "workshop/bench/samples.h"
#include "workshop/models/model_config.h"

namespace tessera::app {

/// Returns the model that `bench step`, `bench memory` and `bench buckets` train, with one sequence for each rank. It
/// is a GPT of 10.6 million parameters, or of 0.2 million if `small`.
models::GPTConfig studied_gpt(bool small);

/// A contender's name, and the strategy under which it trains. If `alone` is true, each rank trains by itself, all
/// ranks at the same time.
struct Contender {
  std::string name;
  Strategy strategy;
  bool alone = false;
};
/// Returns "no communication", every strategy of a mesh with one axis, and FULL_SHARD without shared memory.
std::vector<Contender> contenders();

/// Options of study_steps.
struct StepStudyOptions {
  models::GPTConfig model;
  int rounds = 5;   ///< each round runs all contenders, each with its own model and Engine
  int warm_up = 3;  ///< steps of a contender at the beginning of a round that are not counted
  int steps = 10;   ///< steps of a contender in a round that are counted
};

/// The steps of one contender.
struct StepTiming {
  std::string name;
  Samples step;                       ///< time on the slowest rank
  Samples forward, backward, update;  ///< parts of the step on rank 0; `update` is Engine::step
  Samples communication;              ///< rank 0's time in collectives within these parts, with waits
};

/// Trains under every contender, one after another. The call is collective; `step` is the same on every rank. All
/// contenders that are not alone must give the same losses, bit for bit; otherwise the function throws tessera::Error
/// (70).
std::vector<StepTiming> study_steps(const Mesh& mesh, const StepStudyOptions& options);

/// Returns three kinds of figures. The first are the median, p10 and p90 of the step, and the medians of its parts. The
/// second are exposed communication (the step minus the step without communication) and its fraction of the step. The
/// third is Gustafson's scaled efficiency: the step without communication divided by the step. Gustafson's law applies
/// here: every rank has its own batch, so N ranks do N times the work.
BenchTable to_table(const std::vector<StepTiming>& timings);

}  // namespace tessera::app
