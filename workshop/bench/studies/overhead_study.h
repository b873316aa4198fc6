#pragma once

// See docs/glossary.md: unit.

#include "tessera/mesh.h"
#include "workshop/bench/bench_table.h"

namespace tessera::app {

/// Measures the time that Tessera costs the host for each operator. The operators are additions of 8 numbers, where
/// nothing else takes time. They run with and without an Engine that watches operators, and with and without one of its
/// parameters among the inputs. It then measures the cost of a unit that is gathered for every operator, which is two
/// small collectives with the transport `host`. The last rows are whole steps of 4000 such units (200 where `operators`
/// is below 1000), with several numbers of units gathered ahead. It is collective, and the figures are those of rank 0.
/// `operators`: their number in a sample.
BenchTable study_overhead(const Mesh& mesh, int rounds, int operators);

}  // namespace tessera::app
