#include "tessera/init.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "engine/job/join_job.h"
#include "engine/job/network_choice.h"
#include "engine/memory/tensor_heap.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "runtime/comm/c10d/c10d_collectives.h"
#include "runtime/comm/job/process_mesh.h"
#include "runtime/comm/meet_in_store.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/backend.h"

namespace tessera {
namespace {

absl::StatusOr<std::shared_ptr<Collectives>> join_group(const MakeBackend& make, double init_timeout_s,
                                                        const Group& group, const std::shared_ptr<C10dStore>& store) {
  BackendRequest request;
  request.name = group.name;
  request.rank = group.rank;
  request.world_ranks = group.world_ranks;
  request.store = c10::make_intrusive<c10d::PrefixStore>("backend/" + group.key(), store->c10d_store());
  request.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(init_timeout_s * 1000));
  TESSERA_RETURN_IF_ERROR(meet_in_store_or_fail(group, "met/backend", *store));
  try {
    c10::intrusive_ptr<c10d::Backend> backend = make(request);
    if (backend) return c10d_collectives(group, TransportKind::kOwn, std::move(backend), store);
    return make_error(ExitCode::kInternal, group.self() + ": group " + group.key() +
                                               ": the program's MakeBackend returned null. [T0178] hint: return a "
                                               "backend for every group, or throw what is wrong");
  } catch (const std::exception& error) {
    return make_error(ExitCode::kPeerLost, group.self() + ": group " + group.key() +
                                               ": the program's MakeBackend threw: " + text_of_c10_exception(error) +
                                               ". [T0179] hint: make sure that all ranks of the group make it");
  }
}

Mesh join_processes(const CommConfig& comm, const Environment& environment) {
  const auto make = [&](const Topology& topology) -> absl::StatusOr<Mesh> {
    NetworkChoice choice(comm);
    TESSERA_ASSIGN_OR_RETURN(Mesh mesh, make_process_mesh(topology, comm, choice.choose()));
    const absl::Status agreed = choice.agree(topology, groups_of(mesh).store());
    if (agreed.ok()) return mesh;
    groups_of(mesh).abort(agreed);  // other ranks may have gone on
    return agreed;
  };
  return join_job(make, environment);
}

}  // namespace

Mesh init(const CommConfig& comm) { return join_processes(comm, process_environment); }

Mesh init(const Strategy& strategy) { return init_in(strategy, process_environment); }

Mesh init_in(const Strategy& strategy, const Environment& environment) {
  if (strategy.memory.tensor_heap) install_tensor_heap();
  return join_processes(strategy.comm, environment);
}

Mesh init(const CommConfig& comm, const MakeBackend& make) {
  if (!make)
    throw Error(ExitCode::kUsage,
                "tessera::init wants a MakeBackend, got an empty function. [T0180] hint: leave it out for Tessera's "
                "own transports");
  if (!comm.network_fit.empty())
    throw Error(ExitCode::kConfig, "comm.network_fit is \"" + comm.network_fit +
                                       "\", but the program brings its own transport. [T0181] hint: leave it out");
  if (comm.outage_s != CommConfig().outage_s)
    throw Error(
        ExitCode::kConfig,
        "comm.outage_s is set, but the program brings its own transport, which alone knows of outages. [T1053] hint: "
        "leave it out");
  const double timeout = comm.init_timeout_s;
  return join_job([&](const Topology& topology) {
    return make_process_mesh(topology, comm,
                             [make, timeout](const Group& group, const std::shared_ptr<C10dStore>& store) {
                               return join_group(make, timeout, group, store);
                             });
  });
}

}  // namespace tessera
