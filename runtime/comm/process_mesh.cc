#include "runtime/comm/process_mesh.h"

#include <cstdlib>
#include <utility>

#include "runtime/base/error.h"
#include "runtime/comm/composed_groups.h"
#include "runtime/comm/gloo_transport.h"
#include "runtime/comm/host_transport.h"
#include "runtime/comm/nccl_transport.h"
#include "runtime/comm/tcp_store.h"

namespace tessera {
namespace {

GroupDefaults defaults_of(const Topology& topology, const CommConfig& comm) {
  GroupDefaults defaults;
  defaults.rank = topology.rank;
  defaults.world_size = topology.world_size;
  defaults.ranks_per_host = topology.local_world_size;
  defaults.timeout_s = comm.timeout_s;
  defaults.init_timeout_s = comm.init_timeout_s;
  return defaults;
}

absl::Status check_choice(const Topology& topology, const CommConfig& comm) {
  if (comm.transport == TransportChoice::kNccl) return nccl_available();
  if (comm.transport == TransportChoice::kHost && topology.num_hosts() > 1)
    return make_error(ExitCode::kConfig, "comm.transport is \"host\", but the " +
                                             std::to_string(topology.world_size) + " ranks are on " +
                                             std::to_string(topology.num_hosts()) +
                                             " hosts; use \"auto\" or \"gloo\"");
  return absl::OkStatus();
}

bool needs_gloo(const Topology& topology, const CommConfig& comm) {
  return comm.transport == TransportChoice::kGloo ||
         (comm.transport == TransportChoice::kAuto && topology.num_hosts() > 1);
}

// This host's address for gloo: loopback where all ranks are here anyway.
absl::StatusOr<std::string> own_address(const Topology& topology) {
  if (topology.num_hosts() == 1 || std::getenv("GLOO_SOCKET_IFNAME")) return std::string("127.0.0.1");
  return address_towards(topology.master_addr);
}

}  // namespace

absl::StatusOr<Mesh> make_process_mesh(const Topology& topology, const CommConfig& comm) {
  TESSERA_RETURN_IF_ERROR(check_choice(topology, comm));
  const GroupDefaults defaults = defaults_of(topology, comm);
  if (topology.world_size == 1)
    return Mesh(topology, composed_group_factory(defaults, nullptr, nullptr), memory_store());
  std::string address;
  if (needs_gloo(topology, comm)) {
    TESSERA_ASSIGN_OR_RETURN(address, own_address(topology));
  }
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<C10dStore> store, tcp_store(topology, comm.init_timeout_s));
  const JoinGroup host = [store](const Group& group) { return host_collectives(group, *store); };
  const JoinGroup gloo = [store, address](const Group& group) {
    return gloo_collectives(group, address, store);
  };
  const JoinGroup nccl = [store, device = topology.local_rank](const Group& group) {
    return nccl_collectives(group, device, store);
  };
  std::shared_ptr<GroupFactory> factory;
  switch (comm.transport) {
    case TransportChoice::kAuto:
      factory = composed_group_factory(defaults, host, gloo);
      break;
    case TransportChoice::kHost:
      factory = composed_group_factory(defaults, host, host);
      break;
    case TransportChoice::kGloo:
      factory = flat_group_factory(defaults, gloo);
      break;
    case TransportChoice::kNccl:
      factory = flat_group_factory(defaults, nccl);
      break;
  }
  return Mesh(topology, std::move(factory), store);
}

absl::StatusOr<Mesh> make_process_mesh(const Topology& topology, const CommConfig& comm, const JoinGroupOnStore& join) {
  if (comm.transport != TransportChoice::kAuto)
    return make_error(ExitCode::kConfig,
                      "comm.transport names a transport, but the program brings its own. hint: leave it at \"auto\"");
  const GroupDefaults defaults = defaults_of(topology, comm);
  if (topology.world_size == 1)
    return Mesh(topology, composed_group_factory(defaults, nullptr, nullptr), memory_store());
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<C10dStore> store, tcp_store(topology, comm.init_timeout_s));
  const JoinGroup join_group = [store, join](const Group& group) { return join(group, store); };
  return Mesh(topology, flat_group_factory(defaults, join_group), store);
}

}  // namespace tessera
