#pragma once

#include <absl/status/statusor.h>

#include <functional>
#include <memory>

#include "runtime/comm/c10d/c10d_store.h"
#include "runtime/comm/group.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/rounds/algorithm.h"
#include "tessera/strategy.h"

namespace tessera {

/// Makes the mesh of ranks that are processes: joins the job's store (tcp_store.h), and returns when all ranks have
/// joined it. `init` calls it once.
///
/// Each transport has a row in a table of process_mesh.cc: the function that makes its mesh.
///
/// | comm.transport | ranks of one host | ranks of several hosts               |
/// |----------------|-------------------|--------------------------------------|
/// | auto           | host              | gloo, or host inside and gloo across |
/// | host           | host              | error 78                             |
/// | gloo           | gloo              | gloo                                 |
/// | nccl           | nccl              | nccl                                 |
/// | cuda_host      | cuda_host         | error 78                             |
/// | mpi            | mpi               | mpi                                  |
///
/// `choose` chooses the algorithms of calls over gloo and mpi (c10d_collectives); it may be null. It has no effect if
/// comm.network_fit asks for measured groups.
///
/// A world of one rank needs neither store nor sockets. Errors are those of tcp_store and of the transports.
absl::StatusOr<Mesh> make_process_mesh(const Topology& topology, const CommConfig& comm,
                                       const ChooseAlgorithm& choose = nullptr);

/// Makes a mesh over the user's own transport, which connects every group of more than one rank. `comm.transport` must
/// be auto.
using JoinGroupOnStore = std::function<absl::StatusOr<std::shared_ptr<Collectives>>(
    const Group& group, const std::shared_ptr<C10dStore>& store)>;
absl::StatusOr<Mesh> make_process_mesh(const Topology& topology, const CommConfig& comm, const JoinGroupOnStore& join);

}  // namespace tessera
