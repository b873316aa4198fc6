#pragma once

// See docs/glossary.md: unit.

#include <cstdint>

#include "tessera/mesh.h"
#include "workshop/bench/bench_table.h"

namespace tessera::app {

/// Options of study_overlap.
struct OverlapStudyOptions {
  int units = 8;
  std::int64_t unit_numel = 3 << 20;  ///< fp32 parameters of a unit
  double compute_s = 0.6;  ///< computation in a step: a third in forward, two thirds in backward, equal for all units
  int rounds = 7;
};

/// Measures how much of a step's communication is hidden behind computation that is a timed sleep, so that processors
/// are free for the transport. Each strategy makes four kinds of steps, by turns: with compute and without, on all
/// ranks and on this rank alone. There is a row for each strategy:
///
///   wire_s      communication with nothing to hide it: a step without compute, less such a step of a rank alone
///   exposed_s   communication that is seen: a step with compute, less such a step of a rank alone
///
/// and the medians of the steps themselves. It is collective, and the figures are those of rank 0.
BenchTable study_overlap(const Mesh& mesh, const OverlapStudyOptions& options);

}  // namespace tessera::app
