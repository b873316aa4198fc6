#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <memory>

#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/collectives.h"
#include "runtime/comm/group.h"
#include "runtime/comm/rounds/algorithm.h"
#include "tessera/topology.h"

namespace tessera {

/// Returns OK if the ranks of a job can meet over MPI: mpirun, srun or another launcher of MPI has started them, and
/// the plug-in (mpi_plugin.h) can be loaded. make_process_mesh calls it before the ranks meet. TESSERA_MPI_PLUGIN has
/// the path of the plug-in. If this variable is not set, the plug-in is libtessera_mpi.so beside this library or
/// program, or in the loader's search path. Errors: 78 if another launcher started the ranks, or if the plug-in has
/// another version; 69 if there is no plug-in, or no MPI for it.
absl::Status check_mpi(const Topology& topology);

/// Makes this rank's side of a group with the `mpi` transport, for CPU ranks on any hosts. Messages go through the
/// machine's MPI, which uses shared memory, InfiniBand or TCP. Tessera adds up the values itself, as over Gloo
/// (c10d_collectives), so sums have the same bits. `choose` has the same meaning as for c10d_collectives. The call is
/// collective over the group. Errors: 75 if a rank does not join within `group.init_timeout_s`, or MPI fails; 78 if MPI
/// has no threads, or counts the ranks differently.
///
/// MPI cannot end a transfer that has stopped in the middle: after an error, the memory of a call under way may still
/// change. A failed rank ends without MPI_Finalize, and its launcher then ends the other ranks.
absl::StatusOr<std::shared_ptr<Collectives>> mpi_collectives(const Group& group, std::shared_ptr<C10dStore> store,
                                                             ChooseAlgorithm choose);

}  // namespace tessera
