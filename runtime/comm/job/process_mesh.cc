#include "runtime/comm/job/process_mesh.h"

#include <algorithm>
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
#include "runtime/comm/mpi/mpi_transport.h"
#include "runtime/comm/nccl/nccl_transport.h"
#include "runtime/comm/rounds/measured_groups.h"
#include "runtime/comm/shared/host_transport.h"
#include "runtime/config/transport_rows.h"

namespace tessera {
namespace {

GroupDefaults defaults_of(const Topology& topology, const CommConfig& comm) {
  GroupDefaults defaults;
  defaults.topology = topology;
  defaults.timeout_s = comm.timeout_s;
  defaults.init_timeout_s = comm.init_timeout_s;
  return defaults;
}

absl::StatusOr<std::shared_ptr<C10dStore>> join_store(const Topology& topology, const CommConfig& comm) {
  return tcp_store(topology, comm.init_timeout_s, word_of(comm.transport));
}

absl::Status check_hosts(const Topology& topology, TransportChoice transport) {
  if (!has(transport, transport_traits::kOneHost) || topology.num_hosts() == 1) return absl::OkStatus();
  const bool on_gpu = has(transport, transport_traits::kOnGpu);
  return make_error(ExitCode::kConfig, "comm.transport is \"" + row_of(transport).word + "\", but the " +
                                           std::to_string(topology.world_size) + " ranks are on " +
                                           std::to_string(topology.num_hosts()) + " hosts. [T0460] hint: take " +
                                           (on_gpu ? "\"nccl\"" : "\"auto\" or \"gloo\""));
}

// Returns this host's address for Gloo. It is loopback if all ranks are on this host, or if GLOO_SOCKET_IFNAME is set,
// since Gloo then does not use the address.
absl::StatusOr<std::string> own_address(const Topology& topology, double init_timeout_s) {
  if (topology.num_hosts() == 1 || std::getenv("GLOO_SOCKET_IFNAME")) return std::string("127.0.0.1");
  return address_towards(topology.master_addr, init_timeout_s);
}

// Returns the address at which CallWatch lets other ranks watch this process: the address of Gloo. If
// GLOO_SOCKET_IFNAME chooses Gloo's address, the result is this host's address towards the host of rank 0. It is "" if
// no address is known. This process is then not watched.
std::string watched_address(const Topology& topology, const std::string& of_gloo, double init_timeout_s) {
  if (topology.num_hosts() == 1 || !std::getenv("GLOO_SOCKET_IFNAME")) return of_gloo;
  return address_towards(topology.master_addr, init_timeout_s).value_or("");
}

/// Returns the function by which ranks with GPUs join groups for host memory: over shared memory if ranks of one host
/// map memory together, else over Gloo. Most jobs make no such group, so this host's address for Gloo is looked up only
/// when a group over Gloo is made.
JoinGroup join_hosts_of_gpus(const Topology& topology, const CommConfig& comm,
                             const std::shared_ptr<C10dStore>& store) {
  return [=](const Group& group) -> absl::StatusOr<std::shared_ptr<Collectives>> {
    if (group.use == GroupUse::kCommonMemory && topology.num_hosts() == 1) return host_collectives(group, *store);
    TESSERA_ASSIGN_OR_RETURN(const std::string address, own_address(topology, comm.init_timeout_s));
    return gloo_collectives(group, address, store);
  };
}

/// Returns the function with which a transport joins groups of ranks on GPUs. The parameter `gpu` is this rank's GPU.
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
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<C10dStore> store, join_store(topology, comm));
  groups.join = join(gpu, store);
  groups.join_on_host = join_hosts_of_gpus(topology, comm, store);
  return make_mesh(topology, device_group_factory(defaults, std::move(groups)), store);
}

// Makes a mesh with one GPU for each rank, by local rank.
absl::StatusOr<Mesh> make_nccl_mesh(const Topology& topology, const CommConfig& comm, const ChooseAlgorithm&) {
  TESSERA_RETURN_IF_ERROR(gpu_count().status());
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

// Makes a mesh whose ranks share this machine's GPUs: a rank gets the GPU local_rank % number of GPUs.
absl::StatusOr<Mesh> make_cuda_host_mesh(const Topology& topology, const CommConfig& comm, const ChooseAlgorithm&) {
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

using Store = std::shared_ptr<C10dStore>;
/// Makes the factory of a mesh on the CPU, after the job's store has been joined.
using MakeFactory = std::function<std::shared_ptr<GroupFactory>(const GroupDefaults&, const Store&)>;

/// Makes a mesh of ranks that train on the CPU.
absl::StatusOr<Mesh> make_cpu_mesh(const Topology& topology, const CommConfig& comm, const MakeFactory& make_factory) {
  const GroupDefaults defaults = defaults_of(topology, comm);
  if (topology.world_size == 1)
    return make_mesh(topology, composed_group_factory(defaults, nullptr, nullptr), memory_store());
  TESSERA_ASSIGN_OR_RETURN(Store store, join_store(topology, comm));
  Mesh mesh = make_mesh(topology, make_factory(defaults, store), store);
  groups_of(mesh).watch().bear_outages(comm.outage_s);
  return mesh;
}

JoinGroup join_host(const Store& store) {
  return [store](const Group& group) { return host_collectives(group, *store); };
}

/// Returns whether the ranks of a group have algorithms to choose from, and lie on several hosts. A group of two ranks
/// has no choice, since two ranks send the same messages by every algorithm.
bool may_choose(const Topology& topology, const Group& group) {
  return group.size() > 2 && topology.host_of(group.world_ranks.front()) != topology.host_of(group.world_ranks.back());
}

/// Returns a function that joins groups with `join`. Calls of these groups use the algorithms that comm.network_fit
/// asks for. If comm.network_fit is empty and `choose` is null, groups for which `may_choose` is true measure their
/// network, if this takes little time.
JoinGroup join_and_choose(const Topology& topology, const CommConfig& comm, const ChooseAlgorithm& choose,
                          const JoinAndChoose& join) {
  if (comm.network_fit == CommConfig::kMeasuredNetwork) return measured_groups(join);
  if (comm.network_fit.empty() && !choose) {
    const auto may_measure = [topology](const Group& group) { return may_choose(topology, group); };
    return measured_groups(join, {.may_measure = may_measure, .most_seconds = 2, .least_bytes = 16 << 10});
  }
  return [join, choose](const Group& group) { return join(group, choose); };
}

/// Returns a function that joins groups over Gloo. `address` is this host's own address, or empty if no group needs
/// Gloo.
JoinGroup join_gloo(const Topology& topology, const CommConfig& comm, const std::string& address,
                    const ChooseAlgorithm& choose, const Store& store) {
  if (!address.empty()) store->set_own_address(watched_address(topology, address, comm.init_timeout_s));
  return join_and_choose(topology, comm, choose, [store, address](const Group& group, ChooseAlgorithm by) {
    return gloo_collectives(group, address, store, std::move(by));
  });
}

absl::StatusOr<Mesh> make_auto_mesh(const Topology& topology, const CommConfig& comm, const ChooseAlgorithm& choose) {
  std::string address;  // only groups across hosts need an address
  if (topology.num_hosts() > 1) {
    TESSERA_ASSIGN_OR_RETURN(address, own_address(topology, comm.init_timeout_s));
  }
  return make_cpu_mesh(topology, comm, [&](const GroupDefaults& defaults, const Store& store) {
    return composed_group_factory(defaults, join_host(store), join_gloo(topology, comm, address, choose, store));
  });
}

absl::StatusOr<Mesh> make_host_mesh(const Topology& topology, const CommConfig& comm, const ChooseAlgorithm&) {
  return make_cpu_mesh(topology, comm, [](const GroupDefaults& defaults, const Store& store) {
    return composed_group_factory(defaults, join_host(store), join_host(store));
  });
}

absl::StatusOr<Mesh> make_gloo_mesh(const Topology& topology, const CommConfig& comm, const ChooseAlgorithm& choose) {
  std::string address;  // a job of one rank needs none
  if (topology.world_size > 1) {
    TESSERA_ASSIGN_OR_RETURN(address, own_address(topology, comm.init_timeout_s));
  }
  return make_cpu_mesh(topology, comm, [&](const GroupDefaults& defaults, const Store& store) {
    return flat_group_factory(defaults, join_gloo(topology, comm, address, choose, store));
  });
}

absl::StatusOr<Mesh> make_mpi_mesh(const Topology& topology, const CommConfig& comm, const ChooseAlgorithm& choose) {
  std::string address;  // a job of one rank needs none
  if (topology.world_size > 1) {
    TESSERA_RETURN_IF_ERROR(check_mpi(topology));
    TESSERA_ASSIGN_OR_RETURN(address, own_address(topology, comm.init_timeout_s));
  }
  return make_cpu_mesh(topology, comm, [&](const GroupDefaults& defaults, const Store& store) {
    store->set_own_address(watched_address(topology, address, comm.init_timeout_s));
    const JoinAndChoose join = [store](const Group& group, ChooseAlgorithm by) {
      return mpi_collectives(group, store, std::move(by));
    };
    return flat_group_factory(defaults, join_and_choose(topology, comm, choose, join));
  });
}

/// The function that makes the mesh of a transport.
struct MeshRow {
  TransportChoice choice;
  absl::StatusOr<Mesh> (*make)(const Topology& topology, const CommConfig& comm, const ChooseAlgorithm& choose);
};

constexpr MeshRow kMeshRows[] = {
    {TransportChoice::kAuto, make_auto_mesh},          {TransportChoice::kHost, make_host_mesh},
    {TransportChoice::kGloo, make_gloo_mesh},          {TransportChoice::kNccl, make_nccl_mesh},
    {TransportChoice::kCudaHost, make_cuda_host_mesh}, {TransportChoice::kMpi, make_mpi_mesh}};

#define TESSERA_IS_MADE(enumerator, ...) \
  &&std::ranges::count(kMeshRows, TransportChoice::enumerator, &MeshRow::choice) == 1
static_assert(true TESSERA_TRANSPORTS(TESSERA_IS_MADE), "each transport has one row here");
#undef TESSERA_IS_MADE

}  // namespace

absl::StatusOr<Mesh> make_process_mesh(const Topology& topology, const CommConfig& comm,
                                       const ChooseAlgorithm& choose) {
  TESSERA_RETURN_IF_ERROR(check_hosts(topology, comm.transport));
  return std::ranges::find(kMeshRows, comm.transport, &MeshRow::choice)->make(topology, comm, choose);
}

absl::StatusOr<Mesh> make_process_mesh(const Topology& topology, const CommConfig& comm, const JoinGroupOnStore& join) {
  if (comm.transport != TransportChoice::kAuto)
    return make_error(
        ExitCode::kConfig,
        "comm.transport names a transport, but the program brings its own. [T0461] hint: leave it at \"auto\"");
  const GroupDefaults defaults = defaults_of(topology, comm);
  if (topology.world_size == 1)
    return make_mesh(topology, composed_group_factory(defaults, nullptr, nullptr), memory_store());
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<C10dStore> store,
                           tcp_store(topology, comm.init_timeout_s, "the program's own"));
  const JoinGroup join_group = [store, join](const Group& group) { return join(group, store); };
  return make_mesh(topology, flat_group_factory(defaults, join_group), store);
}

}  // namespace tessera
