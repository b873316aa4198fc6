#pragma once

#include "tessera/mesh.h"
#include "workshop/bench/bench_table.h"
#include "workshop/models/model_config.h"

namespace tessera::app {

/// Returns a row for every strategy: the plan of one rank, what its Engine allocated, and what the kernel charges the
/// process for the Engine. The charge is taken between two steps, when no activation lives, less the charge before the
/// model was made. It counts anonymous memory, and the process's share of memory that ranks map together
/// (proc_pid_smaps(5)). ZeRO's formula (arXiv 1910.02054, figure 1) for fp32 parameters stands beside it: 16P, 8P +
/// 8P/N, 4P + 12P/N, 16P/N bytes. It is collective, and the figures are those of rank 0.
BenchTable study_memory(const Mesh& mesh, const models::GPTConfig& config);

}  // namespace tessera::app
