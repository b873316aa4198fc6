#include "runtime/comm/job/process_mesh.h"

#include <cstdlib>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/c10d/gloo_transport.h"
#include "runtime/comm/c10d/tcp_store.h"
#include "runtime/comm/compose/composed_groups.h"
#include "runtime/comm/cuda_host/cuda_host_collectives.h"
#include "runtime/comm/device/device_solo.h"
#include "runtime/comm/device/gpus.h"
#include "runtime/comm/device/staged_collectives.h"
#include "runtime/comm/nccl/nccl_transport.h"
#include "runtime/comm/rounds/measured_groups.h"
#include "runtime/comm/shared/host_transport.h"

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
  if (comm.transport == TransportChoice::kNccl) return gpu_count().status();
  const bool on_one_host = comm.transport == TransportChoice::kHost || comm.transport == TransportChoice::kCudaHost;
  const std::string name = comm.transport == TransportChoice::kHost ? "host" : "cuda_host";
  if (on_one_host && topology.num_hosts() > 1)
    return make_error(ExitCode::kConfig, "comm.transport is \"" + name + "\", but the " +
                                             std::to_string(topology.world_size) + " ranks are on " +
                                             std::to_string(topology.num_hosts()) + " hosts. [T0460] hint: take " +
                                             (name == "host" ? "\"auto\" or \"gloo\"" : "\"nccl\""));
  return absl::OkStatus();
}

bool needs_gloo(const Topology& topology, const CommConfig& comm) {
  return comm.transport == TransportChoice::kGloo ||
         (comm.transport == TransportChoice::kAuto && topology.num_hosts() > 1);
}

// Returns this host's address for gloo: loopback if all ranks are on this host.
absl::StatusOr<std::string> own_address(const Topology& topology, double init_timeout_s) {
  if (topology.num_hosts() == 1 || std::getenv("GLOO_SOCKET_IFNAME")) return std::string("127.0.0.1");
  return address_towards(topology.master_addr, init_timeout_s);
}

// Returns the address at which CallWatch lets other ranks watch this process: Gloo's, but where GLOO_SOCKET_IFNAME
// chooses Gloo's, the one towards rank 0's host. It is "" if that is not known, and then nobody watches.
std::string watched_address(const Topology& topology, const std::string& of_gloo, double init_timeout_s) {
  if (topology.num_hosts() == 1 || !std::getenv("GLOO_SOCKET_IFNAME")) return of_gloo;
  return address_towards(topology.master_addr, init_timeout_s).value_or("");
}

/// Says how ranks with GPUs join for the memory of their hosts. Most jobs make no such group, so the needs of Gloo are
/// looked for when such a group is made.
JoinGroup gloo_on_hosts(const Topology& topology, const CommConfig& comm, const std::shared_ptr<C10dStore>& store) {
  return [=](const Group& group) -> absl::StatusOr<std::shared_ptr<Collectives>> {
    TESSERA_ASSIGN_OR_RETURN(const std::string address, own_address(topology, comm.init_timeout_s));
    return gloo_collectives(group, address, store);
  };
}

/// The way in which one transport joins ranks on GPUs; `gpu` is this rank's GPU.
using JoinOnGpu = std::function<JoinGroup(int gpu, const std::shared_ptr<C10dStore>& store)>;

absl::StatusOr<Mesh> make_gpu_mesh(const Topology& topology, const CommConfig& comm, int gpu, const JoinOnGpu& join) {
  const GroupDefaults defaults = defaults_of(topology, comm);
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(gpu));
  DeviceGroups groups;
  groups.alone = [device] { return solo_on_device(device); };
  groups.control = [device](std::shared_ptr<Collectives> group) {
    return staged_collectives(std::move(group), device);
  };
  if (topology.world_size == 1)
    return make_mesh(topology, device_group_factory(defaults, std::move(groups)), memory_store());
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<C10dStore> store, tcp_store(topology, comm.init_timeout_s));
  groups.join = join(gpu, store);
  groups.join_on_host = gloo_on_hosts(topology, comm, store);
  return make_mesh(topology, device_group_factory(defaults, std::move(groups)), store);
}

// Makes a mesh with one GPU for each rank, by local rank.
absl::StatusOr<Mesh> make_nccl_mesh(const Topology& topology, const CommConfig& comm) {
  TESSERA_RETURN_IF_ERROR(use_gpu(topology.local_rank));
  const NcclBuffers buffers = comm.nccl_buffers;
  return make_gpu_mesh(topology, comm, topology.local_rank,
                       [buffers](int gpu, const std::shared_ptr<C10dStore>& store) {
                         return [gpu, buffers, store, groups = std::make_shared<QueuedGroups>()](const Group& group) {
                           const NcclBuffers own = group.use == GroupUse::kGather ? buffers : NcclBuffers::kPlain;
                           return nccl_collectives(group, gpu, own, groups, store);
                         };
                       });
}

// Makes a mesh whose ranks share the existing GPUs in turn.
absl::StatusOr<Mesh> make_cuda_host_mesh(const Topology& topology, const CommConfig& comm) {
  TESSERA_ASSIGN_OR_RETURN(const int count, gpu_count());
  const int own = topology.local_rank % count;
  TESSERA_RETURN_IF_ERROR(use_gpu(own));
  return make_gpu_mesh(topology, comm, own, [](int gpu, const std::shared_ptr<C10dStore>& store) {
    return [gpu, store](const Group& group) -> absl::StatusOr<std::shared_ptr<Collectives>> {
      TESSERA_ASSIGN_OR_RETURN(auto device, cuda_peer_device(gpu));
      TESSERA_ASSIGN_OR_RETURN(auto host, host_collectives(group, *store));
      return cuda_host_collectives(group, std::move(host), std::move(device));
    };
  });
}

}  // namespace

absl::StatusOr<Mesh> make_process_mesh(const Topology& topology, const CommConfig& comm,
                                       const ChooseAlgorithm& choose) {
  TESSERA_RETURN_IF_ERROR(check_choice(topology, comm));
  const GroupDefaults defaults = defaults_of(topology, comm);
  if (comm.transport == TransportChoice::kNccl) return make_nccl_mesh(topology, comm);
  if (comm.transport == TransportChoice::kCudaHost) return make_cuda_host_mesh(topology, comm);
  if (topology.world_size == 1)
    return make_mesh(topology, composed_group_factory(defaults, nullptr, nullptr), memory_store());
  std::string address;
  if (needs_gloo(topology, comm)) {
    TESSERA_ASSIGN_OR_RETURN(address, own_address(topology, comm.init_timeout_s));
  }
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<C10dStore> store, tcp_store(topology, comm.init_timeout_s));
  if (needs_gloo(topology, comm)) store->set_own_address(watched_address(topology, address, comm.init_timeout_s));
  const JoinGroup host = [store](const Group& group) { return host_collectives(group, *store); };
  const JoinAndChoose join_gloo = [store, address](const Group& group, ChooseAlgorithm by) {
    return gloo_collectives(group, address, store, std::move(by));
  };
  const JoinGroup gloo = comm.network_fit == CommConfig::kMeasuredNetwork
                             ? measured_groups(join_gloo)
                             : [join_gloo, choose](const Group& group) { return join_gloo(group, choose); };
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
    case TransportChoice::kCudaHost:
      break;  // this case is handled above
  }
  return make_mesh(topology, std::move(factory), store);
}

absl::StatusOr<Mesh> make_process_mesh(const Topology& topology, const CommConfig& comm, const JoinGroupOnStore& join) {
  if (comm.transport != TransportChoice::kAuto)
    return make_error(
        ExitCode::kConfig,
        "comm.transport names a transport, but the program brings its own. [T0461] hint: leave it at \"auto\"");
  const GroupDefaults defaults = defaults_of(topology, comm);
  if (topology.world_size == 1)
    return make_mesh(topology, composed_group_factory(defaults, nullptr, nullptr), memory_store());
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<C10dStore> store, tcp_store(topology, comm.init_timeout_s));
  const JoinGroup join_group = [store, join](const Group& group) { return join(group, store); };
  return make_mesh(topology, flat_group_factory(defaults, join_group), store);
}

}  // namespace tessera
