#pragma once

#include "tessera/mesh.h"
#include "tessera/strategy.h"

namespace tessera {

/// Joins this process to its job: reads the launcher's variables (torchrun, Slurm, Open MPI, PMI, MVAPICH2, `tessera
/// launch`; without any, the job has one rank), meets the other ranks, and returns the mesh of all of them. Call it
/// once on every rank, before any Engine. Give it the strategy's `comm`, which chooses transport and time limits.
///
/// Throws tessera::Error: 78 for variables that do not fit together, 69 for a port in use, 75 for ranks that do not
/// come within comm.init_timeout_s (the message names them).
Mesh init(const CommConfig& comm = {});

/// Does what the function above does, with everything that a strategy needs before the model is made: `comm`, and
/// memory.tensor_heap, which helps more the earlier it is applied.
Mesh init(const Strategy& strategy);

}  // namespace tessera
