#include "runtime/comm/resolve_topology.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/launcher_variables.h"

namespace tessera {

// This file makes a Topology from the variables of the launcher that started this process.
//
// `resolve_topology` lets find_launcher choose the launcher's dialect. `place` then finds out which ranks share a host,
// `find_run_id` and `find_rendezvous` find out where ranks meet, and `read_restarts` finds out how often they were
// restarted. `pretend_hosts` makes several hosts out of one, for tests. An error names the variables that contradict
// each other, with their values.

namespace {

constexpr int kDefaultPort = 29500;  // this is torchrun's default

/// Returns the first host of a Slurm list: "node[03-05,9],x1" gives "node03"; "a[1-2]b[07-09]c" gives "a1b07c".
std::string first_host(std::string_view list) {
  std::string host;
  while (!list.empty() && list.front() != ',') {
    if (list.front() != '[') {
      host += list.front();
      list.remove_prefix(1);
      continue;
    }
    const auto close = list.find(']');
    if (close == std::string_view::npos) return "";
    const auto range = list.substr(1, close - 1);
    host += range.substr(0, range.find_first_of(",-"));
    list.remove_prefix(close + 1);
  }
  return host;
}

absl::Status place(const LauncherVariables& variables, Candidate c, Topology& topology) {
  const Dialect& d = *c.dialect;
  if (c.world_size == 1) {
    if (c.local_rank < 0) c.local_rank = 0;
    if (c.local_world_size < 0) c.local_world_size = 1;
  }
  if (!c.knows_locals() && &d == &kProcessGroup) {
    c.local_rank = c.rank;
    c.local_world_size = c.world_size;
  }
  if (!c.knows_locals() && &d != &kSlurm && *d.local_rank == '\0')
    return launcher_error(
        fmt::format("{}={}, {}={} ({}), but no variables of a launcher say which ranks share a host. [T0475] hint: "
                    "start the program with torchrun, srun or `tessera launch`, or call init_process_group first",
                    d.rank, c.rank, d.world_size, c.world_size, d.title));
  if (!c.knows_locals()) {
    const char* local_size = &d == &kSlurm ? "SLURM_TASKS_PER_NODE" : d.local_world_size;
    return partial_error(variables, d, {d.rank, d.world_size, d.local_rank, local_size});
  }
  if (c.ranks_of_hosts.empty() && c.world_size % c.local_world_size != 0)
    return launcher_error(fmt::format(
        "{}={} does not fill hosts of {}={} evenly ({}). [T0476] hint: for as many ranks on every host, "
        "{}; or say the ranks of each host to all ranks, as in {}=2,3",
        c.world_origin, c.world_size, c.local_origin, c.local_world_size, d.title, d.order_hint, kHostsVariable));
  topology = c.topology();
  if (topology.local_rank != c.local_rank)
    return launcher_error(
        fmt::format("{}={} but {}={} with {} ranks on its host ({}): ranks count host by host. "
                    "[T0477] hint: for that {}",
                    d.rank, c.rank, d.local_rank, c.local_rank, c.local_world_size, d.title, d.order_hint));
  return absl::OkStatus();
}

absl::Status name_launcher(const LauncherVariables& variables, Topology& topology) {
  const auto name = variables.text("TESSERA_LAUNCHER");
  if (!name || topology.launcher != "torchrun") return absl::OkStatus();
  if (*name != "tessera")
    return launcher_error(
        fmt::format("TESSERA_LAUNCHER={}: only `tessera launch` sets it, to tessera. [T0478] hint: unset it", *name));
  topology.launcher = "tessera";
  return absl::OkStatus();
}

/// Finds an identifier that differs between jobs and is the same on all ranks of a job, if the launcher has one.
void find_run_id(const LauncherVariables& variables, Topology& topology) {
  const auto take = [&](const char* name) { topology.run_id = variables.text(name).value_or(""); };
  if (topology.launcher == "torchrun" || topology.launcher == "tessera") take("TORCHELASTIC_RUN_ID");
  if (topology.launcher == "slurm") take("SLURM_JOB_ID");
  if (topology.launcher == "slurm" && variables.has("SLURM_STEP_ID"))
    topology.run_id += "." + *variables.text("SLURM_STEP_ID");
  if (topology.launcher == "openmpi") take("OMPI_MCA_ess_base_jobid");
  if (topology.launcher == "openmpi" && topology.run_id.empty()) take("PMIX_NAMESPACE");
  if (topology.launcher == "pmi") take("PMI_JOBID");
}

/// Returns a port that jobs on one host hardly ever share: 15000 + hash(run id) % 10000, below the ephemeral range.
int port_of(const std::string& run_id) {
  if (run_id.empty()) return kDefaultPort;
  std::uint32_t hash = 2166136261u;  // this is FNV-1a
  for (const unsigned char byte : run_id) hash = (hash ^ byte) * 16777619u;
  return 15000 + static_cast<int>(hash % 10000);
}

absl::Status find_rendezvous(const LauncherVariables& variables, const Dialect& d, Topology& topology) {
  if (&d == &kProcessGroup && variables.has(kProcessGroupStorePort)) {
    topology.master_addr = variables.text(kProcessGroupStoreHost).value_or(topology.master_addr);
    TESSERA_ASSIGN_OR_RETURN(topology.master_port, variables.number(d, kProcessGroupStorePort, 1, 65535));
    topology.agent_store = true;
    return absl::OkStatus();
  }
  if (auto address = variables.text("MASTER_ADDR")) {
    topology.master_addr = *address;
  } else if (topology.num_hosts() > 1) {
    if (topology.launcher == "slurm") {
      const char* name = variables.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
      const std::string list = variables.text(name).value_or("");
      topology.master_addr = first_host(list);
      if (topology.master_addr.empty())
        return launcher_error(
            fmt::format("{}={} (Slurm): want a list of hosts such as node[03-05,9],x1. [T0479] hint: set "
                        "MASTER_ADDR to the host of rank 0",
                        name, list));
    } else {
      return launcher_error(
          fmt::format("MASTER_ADDR is not set, and the {} ranks ({}) lie on {} hosts. [T0480] hint: set it to "
                      "the host of rank 0",
                      topology.world_size, d.title, topology.num_hosts()));
    }
  }
  const bool torch_like = &d == &kTorchrun || &d == &kProcessGroup;
  topology.master_port = torch_like ? kDefaultPort : port_of(topology.run_id);
  if (!variables.has("MASTER_PORT")) return absl::OkStatus();
  // if the system chooses the port, only one process has its number
  const int lowest = topology.world_size == 1 ? 0 : 1;
  TESSERA_ASSIGN_OR_RETURN(topology.master_port, variables.number(d, "MASTER_PORT", lowest, 65535));
  return absl::OkStatus();
}

absl::Status read_restarts(const LauncherVariables& variables, const Dialect& d, Topology& topology) {
  const bool torch_like = &d == &kTorchrun;
  const char* name = torch_like ? "TORCHELASTIC_RESTART_COUNT" : &d == &kSlurm ? "SLURM_RESTART_COUNT" : "";
  if (variables.has(name)) {
    TESSERA_ASSIGN_OR_RETURN(topology.restart_count, variables.number(d, name, 0, std::numeric_limits<int>::max()));
  }
  const auto agent = variables.text("TORCHELASTIC_USE_AGENT_STORE").value_or("False");
  if (!torch_like) return absl::OkStatus();
  if (agent != "True" && agent != "true" && agent != "1" && agent != "False" && agent != "false" && agent != "0")
    return launcher_error(
        fmt::format("TORCHELASTIC_USE_AGENT_STORE={} (torchrun): want True or False. [T0481] hint: unset it; torchrun "
                    "sets it by itself",
                    agent));
  topology.agent_store = agent == "True" || agent == "true" || agent == "1";
  return absl::OkStatus();
}

std::vector<int> ranks_of_hosts(const Topology& topology) {
  if (!topology.has_equal_hosts()) return topology.ranks_of_hosts;
  return std::vector<int>(static_cast<std::size_t>(topology.num_hosts()), topology.local_world_size);
}

/// Reads TESSERA_HOSTS: the ranks of each host. A single number is the number of hosts, which then have equally many
/// ranks.
absl::StatusOr<std::vector<int>> read_hosts(const LauncherVariables& variables, const Topology& topology) {
  TESSERA_ASSIGN_OR_RETURN(std::vector<int> list, variables.ranks_of_hosts(kHostsVariable));
  const std::int64_t sum = std::accumulate(list.begin(), list.end(), std::int64_t{0});
  if (!list.empty() && sum != topology.world_size)
    return launcher_error(
        fmt::format("{}={} says {} ranks, and the job has {} ({}). [T0984] hint: say the ranks of each host, "
                    "in their order, or unset it",
                    kHostsVariable, *variables.text(kHostsVariable), sum, topology.world_size, topology.launcher));
  if (!list.empty()) return list;
  Dialect self = kTorchrun;
  self.title = "a number of hosts, or the ranks of each";
  TESSERA_ASSIGN_OR_RETURN(const int hosts, variables.number(self, kHostsVariable, 1, kMostRanks));
  if (hosts == topology.num_hosts()) return ranks_of_hosts(topology);
  if (topology.num_hosts() == 1 && topology.world_size % hosts != 0)
    return launcher_error(
        fmt::format("{}={} does not divide the {} ranks ({}) evenly. [T0483] hint: give a divisor, or the ranks of "
                    "each host as in 2,3, or unset it",
                    kHostsVariable, hosts, topology.world_size, topology.launcher));
  return std::vector<int>(static_cast<std::size_t>(hosts), topology.world_size / hosts);
}

/// Makes several hosts out of the ranks of one machine if TESSERA_HOSTS asks for it (for tests).
absl::Status pretend_hosts(const LauncherVariables& variables, Topology& topology) {
  if (!variables.has(kHostsVariable)) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::vector<int> hosts, read_hosts(variables, topology));
  if (hosts == ranks_of_hosts(topology)) return absl::OkStatus();
  if (topology.num_hosts() > 1)
    return launcher_error(fmt::format("{}={}, but the ranks already lie on {} hosts ({}). [T0482] hint: unset it",
                                      kHostsVariable, *variables.text(kHostsVariable), topology.num_hosts(),
                                      topology.launcher));
  topology.put_on_hosts(hosts);
  return absl::OkStatus();
}

}  // namespace

void Topology::put_on_hosts(const std::vector<int>& ranks) {
  const bool are_equal = std::ranges::all_of(ranks, [&](int count) { return count == ranks.front(); });
  ranks_of_hosts = are_equal ? std::vector<int>() : ranks;
  local_world_size = ranks.front();
  host = host_of(rank);
  local_world_size = ranks[static_cast<std::size_t>(host)];
  local_rank = rank - std::accumulate(ranks.begin(), ranks.begin() + host, 0);
}

int Topology::num_hosts() const {
  return has_equal_hosts() ? world_size / local_world_size : static_cast<int>(ranks_of_hosts.size());
}

int Topology::host_of(int wanted) const {
  if (has_equal_hosts()) return wanted / local_world_size;
  int index = 0;
  for (int end = ranks_of_hosts.front(); end <= wanted && index + 1 < num_hosts(); ++index)
    end += ranks_of_hosts[static_cast<std::size_t>(index) + 1];
  return index;
}

bool Topology::hosts_hold_whole_groups_of(int size) const {
  if (has_equal_hosts()) return local_world_size % size == 0;
  return std::ranges::all_of(ranks_of_hosts, [&](int count) { return count % size == 0; });
}

std::string Topology::describe() const {
  return fmt::format("rank {}/{} ({}), host {}, local rank {}", rank, world_size, launcher, host, local_rank);
}

std::optional<std::string> process_environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value ? std::optional<std::string>(value) : std::nullopt;
}

absl::StatusOr<Topology> resolve_topology(const Environment& environment) {
  const LauncherVariables variables(environment);
  TESSERA_ASSIGN_OR_RETURN(const auto launcher, find_launcher(variables));
  Topology topology;
  const Dialect& dialect = launcher ? *launcher->dialect : kTorchrun;  // torchrun sets MASTER_ADDR and MASTER_PORT
  if (launcher) TESSERA_RETURN_IF_ERROR(place(variables, *launcher, topology));
  TESSERA_RETURN_IF_ERROR(name_launcher(variables, topology));
  find_run_id(variables, topology);
  TESSERA_RETURN_IF_ERROR(find_rendezvous(variables, dialect, topology));
  TESSERA_RETURN_IF_ERROR(read_restarts(variables, dialect, topology));
  TESSERA_RETURN_IF_ERROR(pretend_hosts(variables, topology));
  return topology;
}

absl::StatusOr<std::pair<int, int>> resolve_rank(const Environment& environment) {
  const absl::StatusOr<Topology> topology = resolve_topology(environment);
  if (topology.ok()) return std::pair(topology->rank, topology->world_size);
  const Environment without_hosts = [&](const std::string& name) {
    return name == kTorchrun.local_rank || name == "GROUP_RANK" ? std::nullopt : environment(name);
  };
  const LauncherVariables variables(without_hosts);
  if (!variables.has(kProcessGroup.rank)) return topology.status();
  const auto launcher = find_launcher(variables);
  if (!launcher.ok() || !*launcher) return topology.status();
  return std::pair((*launcher)->rank, (*launcher)->world_size);
}

}  // namespace tessera
