#pragma once

#include "tessera/mesh.h"
#include "tessera/strategy.h"

namespace tessera {

/// Joins this process to its job and returns the mesh of all ranks. It reads the launcher's variables (torchrun, Slurm,
/// Open MPI, PMI, MVAPICH2, `tessera launch`) and connects to the other ranks. Without such variables the job has one
/// rank. Call it once on every rank, before any Engine. Give it the strategy's `comm`, which chooses the transport and
/// the time limits.
///
/// Throws tessera::Error: 78 if the variables do not fit together; 69 if a port is in use; 75 if ranks do not connect
/// within comm.init_timeout_s (the message names them).
Mesh init(const CommConfig& comm = {});

/// Joins the job as the function above does. It uses the two parts of `strategy` that are needed before the model is
/// made: `comm`, and memory.tensor_heap, which helps more if it is applied earlier.
Mesh init(const Strategy& strategy);

}  // namespace tessera
