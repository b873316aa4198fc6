#include "runtime/comm/topology.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/error.h"

namespace tessera {
namespace {

constexpr int kDefaultPort = 29500;  // torchrun's own default
constexpr int kMostRanks = 1 << 24;  // a larger number is a mistake, and products of two stay within 64 bits

/// The variables in which one launcher tells a process who it is. Empty name: this launcher has no such variable.
struct Dialect {
  const char* launcher;
  const char* title;  ///< for messages
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_world_size;
  int outerness;           ///< a launcher may start one agent a host of another launcher of lower outerness
  const char* order_hint;  ///< how to make it number ranks host by host
};

constexpr Dialect kTorchrun = {
    "torchrun",   "torchrun",         "RANK", "WORLD_SIZE",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", 0,      "give every host the same --nproc-per-node"};
constexpr Dialect kSlurm = {"slurm",
                            "Slurm",
                            "SLURM_PROCID",
                            "SLURM_NTASKS",
                            "SLURM_LOCALID",
                            "",
                            2,
                            "use srun --distribution=block"};
constexpr Dialect kMpi[] = {
    {"openmpi", "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", 1, "use mpirun --map-by slot with as many slots on every host"},
    {"pmi", "PMI (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", 1,
     "use mpiexec -ppn with the same number on every host"},
    {"mvapich2", "MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE", 1, "use mpirun_rsh with hosts in blocks"}};

/// What one launcher said about this process.
struct Candidate {
  const Dialect* dialect = nullptr;
  int rank = 0;
  int world_size = 1;
  int local_rank = -1;        ///< -1: not said
  int local_world_size = -1;  ///< -1: not said
  std::string local_origin;   ///< the variable local_world_size was read from

  bool knows_locals() const { return local_rank >= 0 && local_world_size > 0; }
};

absl::Status config_error(std::string message) { return make_error(ExitCode::kConfig, std::move(message)); }

/// Reads one environment, remembering nothing. Empty values count as unset, as in `RANK= ./train`.
class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = name.empty() ? std::nullopt : environment_(name);
    return value && !value->empty() ? value : std::nullopt;
  }
  bool has(const std::string& name) const { return text(name).has_value(); }

  /// The variable as an integer of [low, high].
  absl::StatusOr<int> number(const Dialect& dialect, const std::string& name, int low, int high) const {
    const std::string value = text(name).value_or("");
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (error != std::errc() || end != value.data() + value.size() || result < low || result > high)
      return config_error(fmt::format("{}={} ({}): want a whole number from {} to {}", name, value,
                                      dialect.title, low, high));
    return result;
  }

 private:
  const Environment& environment_;
};

// ---------------------------------------------------------------------------------------------- one launcher's set

absl::Status check_ranges(const Candidate& c) {
  const Dialect& d = *c.dialect;
  if (c.rank >= c.world_size)
    return config_error(fmt::format("{}={} but {}={} ({}): a rank is below the world size", d.rank, c.rank,
                                    d.world_size, c.world_size, d.title));
  if (!c.knows_locals()) return absl::OkStatus();
  if (c.local_rank >= c.local_world_size)
    return config_error(fmt::format("{}={} but {}={} ({}): a local rank is below the ranks of its host",
                                    d.local_rank, c.local_rank, c.local_origin, c.local_world_size, d.title));
  if (c.local_world_size > c.world_size)
    return config_error(fmt::format("{}={} but {}={} ({}): a host cannot hold more ranks than the world",
                                    c.local_origin, c.local_world_size, d.world_size, c.world_size, d.title));
  return absl::OkStatus();
}

/// Reads rank and world size; the two locals only where they are set.
absl::StatusOr<Candidate> read_numbers(const Reader& reader, const Dialect& d) {
  Candidate c;
  c.dialect = &d;
  TESSERA_ASSIGN_OR_RETURN(c.world_size, reader.number(d, d.world_size, 1, kMostRanks));
  TESSERA_ASSIGN_OR_RETURN(c.rank, reader.number(d, d.rank, 0, kMostRanks));
  if (reader.has(d.local_rank)) {
    TESSERA_ASSIGN_OR_RETURN(c.local_rank, reader.number(d, d.local_rank, 0, kMostRanks));
  }
  if (reader.has(d.local_world_size)) {
    TESSERA_ASSIGN_OR_RETURN(c.local_world_size, reader.number(d, d.local_world_size, 1, kMostRanks));
    c.local_origin = d.local_world_size;
  }
  return c;
}

absl::Status partial_error(const Reader& reader, const Dialect& d, const std::vector<const char*>& wanted) {
  std::string set, missing;
  for (const char* name : wanted) {
    if (auto value = reader.text(name)) {
      set += fmt::format("{}{}={}", set.empty() ? "" : ", ", name, *value);
    } else {
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", name);
    }
  }
  return config_error(
      fmt::format("only a part of {}'s variables is set: {} without {}. hint: start the program with "
                  "torchrun, srun, mpirun or `tessera launch`, or unset them for one rank",
                  d.title, set, missing));
}

/// torchrun: all four of rank, world size and the two locals, or none.
absl::StatusOr<std::optional<Candidate>> read_torchrun(const Reader& reader) {
  const Dialect& d = kTorchrun;
  const std::vector<const char*> names = {d.rank, d.world_size, d.local_rank, d.local_world_size};
  std::size_t found = 0;
  for (const char* name : names) found += reader.has(name);
  if (found == 0) return std::optional<Candidate>();
  if (found < names.size()) return partial_error(reader, d, names);
  TESSERA_ASSIGN_OR_RETURN(Candidate c, read_numbers(reader, d));
  TESSERA_RETURN_IF_ERROR(check_ranges(c));
  if (reader.has("GROUP_RANK")) {  // torchrun's index of the host
    TESSERA_ASSIGN_OR_RETURN(const int group, reader.number(d, "GROUP_RANK", 0, kMostRanks));
    if (group != c.rank / c.local_world_size)
      return config_error(
          fmt::format("GROUP_RANK={} but RANK={} with LOCAL_WORLD_SIZE={} lies on host {} (torchrun). "
                      "hint: {}",
                      group, c.rank, c.local_world_size, c.rank / c.local_world_size, d.order_hint));
  }
  return std::optional<Candidate>(c);
}

/// The MPIs: rank and size, or neither. Slurm's PMI plug-in sets them without the locals, which Slurm tells itself.
absl::StatusOr<std::optional<Candidate>> read_mpi(const Reader& reader, const Dialect& d) {
  const bool rank = reader.has(d.rank), size = reader.has(d.world_size);
  if (!rank && !size) return std::optional<Candidate>();
  if (!rank || !size)
    return partial_error(reader, d, {d.rank, d.world_size, d.local_rank, d.local_world_size});
  TESSERA_ASSIGN_OR_RETURN(Candidate c, read_numbers(reader, d));
  TESSERA_RETURN_IF_ERROR(check_ranges(c));
  return std::optional<Candidate>(c);
}

// ------------------------------------------------------------------------------------------------------------ Slurm

/// Tasks of every host from "4(x2),3", which means 4, 4, 3. Nothing if the text is not of that form.
std::optional<std::vector<int>> parse_tasks_per_node(std::string_view text) {
  std::vector<int> tasks;
  const auto number = [&](int& value) {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || value < 1 || value > kMostRanks) return false;
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    return true;
  };
  const auto skip = [&](std::string_view token) {
    if (!text.starts_with(token)) return false;
    text.remove_prefix(token.size());
    return true;
  };
  do {
    int count = 0, repeat = 1;
    if (!number(count)) return std::nullopt;
    if (skip("(x") && !(number(repeat) && skip(")"))) return std::nullopt;
    if (repeat > kMostRanks - static_cast<int>(tasks.size())) return std::nullopt;
    tasks.insert(tasks.end(), static_cast<std::size_t>(repeat), count);
  } while (skip(","));
  return text.empty() ? std::optional(tasks) : std::nullopt;
}

/// The step's own list first: what sbatch was asked for does not bind a smaller srun inside it.
absl::Status read_slurm_local_size(const Reader& reader, Candidate& c) {
  std::string other;  // lists that count other tasks than this step's
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    const auto text = reader.text(name);
    if (!text) continue;
    const auto tasks = parse_tasks_per_node(*text);
    if (!tasks)
      return config_error(fmt::format("{}={} (Slurm): want tasks for each node, such as 4(x2)", name, *text));
    if (std::accumulate(tasks->begin(), tasks->end(), std::int64_t{0}) != c.world_size) {
      other = fmt::format("{}={}", name, *text);
      continue;
    }
    if (std::any_of(tasks->begin(), tasks->end(), [&](int count) { return count != tasks->front(); }))
      return config_error(
          fmt::format("{}={} (Slurm): every node must hold as many tasks. hint: give srun "
                      "--ntasks-per-node",
                      name, *text));
    c.local_world_size = tasks->front();
    c.local_origin = name;
    return absl::OkStatus();
  }
  if (reader.has("SLURM_NTASKS_PER_NODE")) {
    TESSERA_ASSIGN_OR_RETURN(c.local_world_size,
                             reader.number(kSlurm, "SLURM_NTASKS_PER_NODE", 1, kMostRanks));
    c.local_origin = "SLURM_NTASKS_PER_NODE";
  } else if (!other.empty()) {
    return config_error(
        fmt::format("{} does not add up to SLURM_NTASKS={} (Slurm). hint: give srun --ntasks-per-node", other,
                    c.world_size));
  }
  return absl::OkStatus();
}

/// A process is a Slurm task if srun started it. An allocation alone (salloc) sets no SLURM_PROCID; the batch script is
/// rank 0 of a step of its own, which SLURM_NTASKS does not count.
bool is_batch_script(const Reader& reader) {
  return reader.text("ENVIRONMENT") == "BATCH" && !reader.has("SLURM_STEP_ID") && !reader.has("SLURM_STEPID");
}

absl::StatusOr<std::optional<Candidate>> read_slurm(const Reader& reader) {
  const Dialect& d = kSlurm;
  if (!reader.has(d.rank) || is_batch_script(reader)) return std::optional<Candidate>();
  if (!reader.has(d.world_size) || !reader.has(d.local_rank))
    return partial_error(reader, d, {d.rank, d.world_size, d.local_rank});
  TESSERA_ASSIGN_OR_RETURN(Candidate c, read_numbers(reader, d));
  TESSERA_RETURN_IF_ERROR(read_slurm_local_size(reader, c));
  if (c.world_size == 1 && c.local_world_size < 0) c.local_world_size = 1;
  TESSERA_RETURN_IF_ERROR(check_ranges(c));
  if (c.knows_locals() && reader.has("SLURM_NODEID")) {
    TESSERA_ASSIGN_OR_RETURN(const int node, reader.number(d, "SLURM_NODEID", 0, kMostRanks));
    if (node != c.rank / c.local_world_size)
      return config_error(fmt::format(
          "SLURM_NODEID={} but SLURM_PROCID={} with {}={} lies on host {} (Slurm): ranks "
          "are numbered host by host. hint: {}",
          node, c.rank, c.local_origin, c.local_world_size, c.rank / c.local_world_size, d.order_hint));
  }
  return std::optional<Candidate>(c);
}

/// First host of a Slurm list: "node[03-05,9],x1" gives "node03"; "a[1-2]b[07-09]c" gives "a1b07c".
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

// ------------------------------------------------------------------------------------------- which launcher counts

/// The same process, seen by two launchers in the same way.
bool agree(const Candidate& a, const Candidate& b) {
  const bool locals = !a.knows_locals() || !b.knows_locals() ||
                      (a.local_rank == b.local_rank && a.local_world_size == b.local_world_size);
  return a.rank == b.rank && a.world_size == b.world_size && locals;
}

/// True if `outer` only started one agent a host (or one at all), which then started the ranks that `inner` counts:
/// torchrun, mpirun or `tessera launch` inside an allocation. torchrun may go on with fewer hosts than Slurm gave it,
/// so its own agent is believed; exported RANK and WORLD_SIZE are not.
bool is_agent_of(const Candidate& outer, const Candidate& inner, bool torchrun_agent) {
  if (outer.dialect->outerness <= inner.dialect->outerness) return false;
  if (inner.world_size == 1 && outer.world_size > 1) return false;  // a forgotten WORLD_SIZE=1
  if (outer.world_size == 1) return true;
  if (outer.local_world_size != 1 || !inner.knows_locals()) return false;
  const bool trusted = inner.dialect == &kTorchrun && torchrun_agent;
  // Open MPI's daemons on the other hosts are a Slurm step that leaves out the first host.
  const int hosts = inner.world_size / inner.local_world_size;
  return trusted || outer.world_size == hosts ||
         (inner.dialect != &kTorchrun && outer.world_size == hosts - 1);
}

std::string say(const Candidate& c) {
  return fmt::format("{}={}, {}={} ({})", c.dialect->rank, c.rank, c.dialect->world_size, c.world_size,
                     c.dialect->title);
}

absl::StatusOr<Candidate> choose(const std::vector<Candidate>& candidates, bool torchrun_agent) {
  Candidate best = candidates.front();
  for (std::size_t i = 1; i < candidates.size(); ++i) {
    const Candidate& next = candidates[i];
    if (agree(best, next)) {
      if (!best.knows_locals() && next.knows_locals()) best = next;
    } else if (is_agent_of(best, next, torchrun_agent)) {
      best = next;
    } else if (!is_agent_of(next, best, torchrun_agent)) {
      return config_error(
          fmt::format("two launchers disagree: {}, but {}. hint: unset the variables of the one that "
                      "did not start this program",
                      say(best), say(next)));
    }
  }
  return best;
}

absl::StatusOr<std::vector<Candidate>> read_candidates(const Reader& reader) {
  std::vector<Candidate> found;
  TESSERA_ASSIGN_OR_RETURN(auto torchrun, read_torchrun(reader));
  if (torchrun) found.push_back(*torchrun);
  TESSERA_ASSIGN_OR_RETURN(auto slurm, read_slurm(reader));
  if (slurm) found.push_back(*slurm);
  for (const Dialect& dialect : kMpi) {
    TESSERA_ASSIGN_OR_RETURN(auto mpi, read_mpi(reader, dialect));
    if (mpi) found.push_back(*mpi);
  }
  return found;
}

// ------------------------------------------------------------------------------------------ from numbers to places

absl::Status place(const Reader& reader, Candidate c, Topology& topology) {
  const Dialect& d = *c.dialect;
  if (c.world_size == 1) {
    if (c.local_rank < 0) c.local_rank = 0;
    if (c.local_world_size < 0) c.local_world_size = 1;
  }
  if (!c.knows_locals()) {
    const char* local_size = &d == &kSlurm ? "SLURM_TASKS_PER_NODE" : d.local_world_size;
    return partial_error(reader, d, {d.rank, d.world_size, d.local_rank, local_size});
  }
  if (c.world_size % c.local_world_size != 0)
    return config_error(fmt::format("{}={} does not fill hosts of {}={} evenly ({}). hint: {}", d.world_size,
                                    c.world_size, c.local_origin, c.local_world_size, d.title, d.order_hint));
  if (c.rank % c.local_world_size != c.local_rank)
    return config_error(
        fmt::format("{}={} but {}={} with {} ranks a host ({}): ranks are numbered host by host. "
                    "hint: {}",
                    d.rank, c.rank, d.local_rank, c.local_rank, c.local_world_size, d.title, d.order_hint));
  topology.rank = c.rank;
  topology.world_size = c.world_size;
  topology.local_rank = c.local_rank;
  topology.local_world_size = c.local_world_size;
  topology.host = c.rank / c.local_world_size;
  topology.launcher = d.launcher;
  return absl::OkStatus();
}

absl::Status name_launcher(const Reader& reader, Topology& topology) {
  const auto name = reader.text("TESSERA_LAUNCHER");
  if (!name || topology.launcher != "torchrun") return absl::OkStatus();
  if (*name != "tessera")
    return config_error(fmt::format("TESSERA_LAUNCHER={}: only `tessera launch` sets it, to tessera", *name));
  topology.launcher = "tessera";
  return absl::OkStatus();
}

/// A number that differs between jobs and is the same on all ranks of one, if the launcher has any.
void find_run_id(const Reader& reader, Topology& topology) {
  const auto take = [&](const char* name) { topology.run_id = reader.text(name).value_or(""); };
  if (topology.launcher == "torchrun" || topology.launcher == "tessera") take("TORCHELASTIC_RUN_ID");
  if (topology.launcher == "slurm") take("SLURM_JOB_ID");
  if (topology.launcher == "slurm" && reader.has("SLURM_STEP_ID"))
    topology.run_id += "." + *reader.text("SLURM_STEP_ID");
  if (topology.launcher == "openmpi") take("OMPI_MCA_ess_base_jobid");
  if (topology.launcher == "openmpi" && topology.run_id.empty()) take("PMIX_NAMESPACE");
  if (topology.launcher == "pmi") take("PMI_JOBID");
}

/// A port that jobs sharing a host do not share: 15000 + hash(run id) % 10000, below the ephemeral range.
int port_of(const std::string& run_id) {
  if (run_id.empty()) return kDefaultPort;
  std::uint32_t hash = 2166136261u;  // FNV-1a
  for (const unsigned char byte : run_id) hash = (hash ^ byte) * 16777619u;
  return 15000 + static_cast<int>(hash % 10000);
}

absl::Status find_rendezvous(const Reader& reader, const Dialect& d, Topology& topology) {
  if (auto address = reader.text("MASTER_ADDR")) {
    topology.master_addr = *address;
  } else if (topology.num_hosts() > 1) {
    if (topology.launcher == "slurm") {
      const char* name = reader.has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
      const std::string list = reader.text(name).value_or("");
      topology.master_addr = first_host(list);
      if (topology.master_addr.empty())
        return config_error(
            fmt::format("{}={} (Slurm): want a list of hosts such as node[03-05,9],x1. hint: set "
                        "MASTER_ADDR to the host of rank 0",
                        name, list));
    } else {
      return config_error(
          fmt::format("MASTER_ADDR is not set, and the {} ranks ({}) lie on {} hosts. hint: set it to "
                      "the host of rank 0",
                      topology.world_size, d.title, topology.num_hosts()));
    }
  }
  const bool torch_like = &d == &kTorchrun;
  topology.master_port = torch_like ? kDefaultPort : port_of(topology.run_id);
  if (!reader.has("MASTER_PORT")) return absl::OkStatus();
  const int lowest =
      topology.world_size == 1 ? 0 : 1;  // a port chosen by the system is known to one process only
  TESSERA_ASSIGN_OR_RETURN(topology.master_port, reader.number(d, "MASTER_PORT", lowest, 65535));
  return absl::OkStatus();
}

absl::Status read_restarts(const Reader& reader, const Dialect& d, Topology& topology) {
  const bool torch_like = &d == &kTorchrun;
  const char* name = torch_like ? "TORCHELASTIC_RESTART_COUNT" : &d == &kSlurm ? "SLURM_RESTART_COUNT" : "";
  if (reader.has(name)) {
    TESSERA_ASSIGN_OR_RETURN(topology.restart_count,
                             reader.number(d, name, 0, std::numeric_limits<int>::max()));
  }
  const auto agent = reader.text("TORCHELASTIC_USE_AGENT_STORE").value_or("False");
  if (!torch_like) return absl::OkStatus();
  if (agent != "True" && agent != "true" && agent != "1" && agent != "False" && agent != "false" &&
      agent != "0")
    return config_error(fmt::format("TORCHELASTIC_USE_AGENT_STORE={} (torchrun): want True or False", agent));
  topology.agent_store = agent == "True" || agent == "true" || agent == "1";
  return absl::OkStatus();
}

/// Testing aid: TESSERA_HOSTS=2 makes two hosts out of the ranks of one machine.
absl::Status pretend_hosts(const Reader& reader, Topology& topology) {
  if (!reader.has("TESSERA_HOSTS")) return absl::OkStatus();
  Dialect self = kTorchrun;
  self.title = "a testing aid that pretends hosts";
  TESSERA_ASSIGN_OR_RETURN(const int hosts, reader.number(self, "TESSERA_HOSTS", 1, kMostRanks));
  if (hosts == topology.num_hosts()) return absl::OkStatus();
  if (topology.num_hosts() > 1)
    return config_error(fmt::format("TESSERA_HOSTS={}, but the ranks already lie on {} hosts ({})", hosts,
                                    topology.num_hosts(), topology.launcher));
  if (topology.world_size % hosts != 0)
    return config_error(fmt::format("TESSERA_HOSTS={} does not divide the {} ranks ({}) evenly", hosts,
                                    topology.world_size, topology.launcher));
  topology.local_world_size = topology.world_size / hosts;
  topology.host = topology.rank / topology.local_world_size;
  topology.local_rank = topology.rank % topology.local_world_size;
  return absl::OkStatus();
}

}  // namespace

std::string Topology::describe() const {
  return fmt::format("rank {}/{} ({}), host {}, local rank {}", rank, world_size, launcher, host, local_rank);
}

std::optional<std::string> process_environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value ? std::optional<std::string>(value) : std::nullopt;
}

absl::StatusOr<Topology> resolve_topology(const Environment& environment) {
  const Reader reader(environment);
  TESSERA_ASSIGN_OR_RETURN(const auto candidates, read_candidates(reader));
  Topology topology;
  const Dialect* dialect = &kTorchrun;  // whose words MASTER_ADDR and MASTER_PORT are
  if (!candidates.empty()) {
    TESSERA_ASSIGN_OR_RETURN(const Candidate chosen, choose(candidates, reader.has("TORCHELASTIC_RUN_ID")));
    dialect = chosen.dialect;
    TESSERA_RETURN_IF_ERROR(place(reader, chosen, topology));
  } else if (is_batch_script(reader) && reader.has("SLURM_NTASKS") && reader.text("SLURM_NTASKS") != "1") {
    return config_error(
        fmt::format("this is the batch script of a Slurm job with SLURM_NTASKS={}, not one of its "
                    "tasks. hint: start the program with srun, or with `tessera launch`",
                    *reader.text("SLURM_NTASKS")));
  }
  TESSERA_RETURN_IF_ERROR(name_launcher(reader, topology));
  find_run_id(reader, topology);
  TESSERA_RETURN_IF_ERROR(find_rendezvous(reader, *dialect, topology));
  TESSERA_RETURN_IF_ERROR(read_restarts(reader, *dialect, topology));
  TESSERA_RETURN_IF_ERROR(pretend_hosts(reader, topology));
  return topology;
}

}  // namespace tessera
