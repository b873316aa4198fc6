#include "runtime/comm/launcher_variables.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/base/text.h"

// Finds the launcher that started this rank. Each launcher is a Dialect, a table of variable names. `read_candidates`
// reads every dialect whose variables are set, with special rules for Slurm. `choose` then drops candidates that agree
// with another candidate, and launchers that only started an agent. One candidate must remain, or else an error shows
// the disagreement.

namespace tessera {

extern const Dialect kTorchrun = {
    "torchrun",   "torchrun",         "RANK", "WORLD_SIZE",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", 0,      "give every host the same --nproc-per-node"};

extern const Dialect kSlurm = {"slurm",
                               "Slurm",
                               "SLURM_PROCID",
                               "SLURM_NTASKS",
                               "SLURM_LOCALID",
                               "",
                               2,
                               "use srun --ntasks-per-node and --distribution=block"};

extern const Dialect kProcessGroup = {"torch.distributed",
                                      "torch.distributed",
                                      "torch.distributed.get_rank()",
                                      "torch.distributed.get_world_size()",
                                      "this process among its host's",
                                      "ranks on its host",
                                      -1,
                                      "give init_process_group ranks host by host, with as many on every host"};

namespace {

/// A world size of 1 does not show which launcher was used: a program under torchrun may import mpi4py.
constexpr Dialect kMpiForPython = {"mpi4py", "mpi4py", "MPI.COMM_WORLD.rank", "MPI.COMM_WORLD.size", "", "", 1, ""};

constexpr Dialect kMpi[] = {
    {"openmpi", "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", 1, "use mpirun --map-by slot with as many slots on every host"},
    {"pmi", "PMI (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", 1,
     "use mpiexec -ppn with the same number on every host"},
    {"mvapich2", "MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
     "MV2_COMM_WORLD_LOCAL_SIZE", 1, "use mpirun_rsh with hosts in blocks of as many ranks each"}};

constexpr std::size_t kLongestError = 1000, kLongestValue = 80;

// ------------------------------------------------------------------------------------------------ ranks of each host

/// Reads the ranks of every host from "4(x2),3", which means 4, 4, 3. Returns nothing if the text has another form.
std::optional<std::vector<int>> parse_ranks_of_hosts(std::string_view text) {
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

// ---------------------------------------------------------------------------------------------- one launcher's set

/// Returns the candidate's place in the job. `hosts` has the numbers of ranks on the hosts, which add up to the world
/// size.
Topology on_hosts(const Candidate& c, const std::vector<int>& hosts) {
  Topology topology;
  topology.rank = c.rank;
  topology.world_size = c.world_size;
  topology.put_on_hosts(hosts);
  return topology;
}

/// Returns whether the ranks of `hosts` add up to the world size, and the candidate's rank is below it.
bool fit(const std::vector<int>& hosts, const Candidate& c) {
  return c.rank < c.world_size &&
         std::accumulate(hosts.begin(), hosts.end(), std::int64_t{0}) == std::int64_t{c.world_size};
}

/// Takes the list of each host's ranks, if there is one that agrees with the launcher's facts about this rank. Most
/// launchers tell a rank only the number of ranks on its own host.
absl::Status take_hosts(const LauncherVariables& variables, Candidate& c) {
  for (const char* name : {kHostsVariable, kProcessGroupHosts}) {
    TESSERA_ASSIGN_OR_RETURN(const std::vector<int> hosts, variables.ranks_of_hosts(name));
    if (hosts.empty() || !c.knows_locals() || !fit(hosts, c)) continue;
    const Topology said = on_hosts(c, hosts);
    if (said.local_rank != c.local_rank || said.local_world_size != c.local_world_size) continue;
    c.ranks_of_hosts = said.ranks_of_hosts;
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::Status check_ranges(const Candidate& c) {
  const Dialect& d = *c.dialect;
  if (c.rank >= c.world_size)
    return launcher_error(fmt::format("{}={} but {}={} ({}): a rank is below the world size", d.rank, c.rank,
                                      c.world_origin, c.world_size, d.title));
  if (!c.knows_locals()) return absl::OkStatus();
  if (c.local_rank >= c.local_world_size)
    return launcher_error(fmt::format("{}={} but {}={} ({}): a local rank is below the ranks of its host", d.local_rank,
                                      c.local_rank, c.local_origin, c.local_world_size, d.title));
  if (c.local_world_size > c.world_size)
    return launcher_error(fmt::format("{}={} but {}={} ({}): a host cannot hold more ranks than the world",
                                      c.local_origin, c.local_world_size, c.world_origin, c.world_size, d.title));
  return absl::OkStatus();
}

/// Reads the rank, and the world size from the variable `world_size`; reads the two local numbers only if they are set.
absl::StatusOr<Candidate> read_numbers(const LauncherVariables& variables, const Dialect& d, const char* world_size) {
  Candidate c;
  c.dialect = &d;
  c.world_origin = world_size;
  TESSERA_ASSIGN_OR_RETURN(c.world_size, variables.number(d, world_size, 1, kMostRanks));
  TESSERA_ASSIGN_OR_RETURN(c.rank, variables.number(d, d.rank, 0, kMostRanks));
  if (variables.has(d.local_rank)) {
    TESSERA_ASSIGN_OR_RETURN(c.local_rank, variables.number(d, d.local_rank, 0, kMostRanks));
  }
  if (variables.has(d.local_world_size)) {
    TESSERA_ASSIGN_OR_RETURN(c.local_world_size, variables.number(d, d.local_world_size, 1, kMostRanks));
    c.local_origin = d.local_world_size;
  }
  TESSERA_RETURN_IF_ERROR(take_hosts(variables, c));
  return c;
}

/// Reads rank and size, or neither of them. Another source may give the local numbers: Slurm's PMI plug-in leaves the
/// local numbers out, and so do programs that set RANK and WORLD_SIZE for init_process_group.
absl::StatusOr<std::optional<Candidate>> read_dialect(const LauncherVariables& variables, const Dialect& d) {
  const bool rank = variables.has(d.rank), size = variables.has(d.world_size);
  if (!rank && !size) return std::optional<Candidate>();
  if (!rank || !size) return partial_error(variables, d, {d.rank, d.world_size, d.local_rank, d.local_world_size});
  TESSERA_ASSIGN_OR_RETURN(Candidate c, read_numbers(variables, d, d.world_size));
  TESSERA_RETURN_IF_ERROR(check_ranges(c));
  return std::optional<Candidate>(c);
}

absl::StatusOr<std::optional<Candidate>> read_torchrun(const LauncherVariables& variables) {
  const Dialect& d = kTorchrun;
  TESSERA_ASSIGN_OR_RETURN(const std::optional<Candidate> c, read_dialect(variables, d));
  if (!c && (variables.has(d.local_rank) || variables.has(d.local_world_size)))
    return partial_error(variables, d, {d.rank, d.world_size, d.local_rank, d.local_world_size});
  if (c && c->knows_locals() && variables.has("GROUP_RANK")) {  // GROUP_RANK is torchrun's index of the host
    TESSERA_ASSIGN_OR_RETURN(const int group, variables.number(d, "GROUP_RANK", 0, kMostRanks));
    const int host = c->topology().host;
    if (group != host)
      return launcher_error(
          fmt::format("GROUP_RANK={} but RANK={} with LOCAL_WORLD_SIZE={} lies on host {} (torchrun). "
                      "[T0462] hint: so that ranks count host by host, {}; or say the ranks of each host to all ranks, "
                      "as in {}=2,3",
                      group, c->rank, c->local_world_size, host, d.order_hint, kHostsVariable));
  }
  return c;
}

// ------------------------------------------------------------------------------------------------------------ Slurm

/// The variable in which srun gives the number of tasks of the step. SLURM_NTASKS has the same number in most steps,
/// but the job's number in other steps. For example, the shell that salloc gives is a step of one task in a job of many
/// tasks.
constexpr const char* kTasksOfStep = "SLURM_STEP_NUM_TASKS";

const char* tasks_variable(const LauncherVariables& variables) {
  return variables.has(kTasksOfStep) ? kTasksOfStep : kSlurm.world_size;
}

/// Reads the step's own list first, since the list of the whole job does not hold for a smaller srun inside the job.
absl::Status read_slurm_local_size(const LauncherVariables& variables, Candidate& c) {
  std::string other;  // lists whose numbers do not add up to this step's tasks
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"}) {
    const auto text = variables.text(name);
    if (!text) continue;
    const auto tasks = parse_ranks_of_hosts(*text);
    if (!tasks)
      return launcher_error(fmt::format("{}={} (Slurm): want tasks for each node, such as 4(x2)", name, *text));
    if (std::accumulate(tasks->begin(), tasks->end(), std::int64_t{0}) != c.world_size) {
      other = fmt::format("{}={}", name, *text);
      continue;
    }
    c.local_world_size = tasks->front();
    c.local_origin = name;
    if (!fit(*tasks, c)) return absl::OkStatus();  // rank >= world size: check_ranges refuses this
    const Topology said = on_hosts(c, *tasks);
    c.local_world_size = said.local_world_size;
    c.ranks_of_hosts = said.ranks_of_hosts;
    return absl::OkStatus();
  }
  if (c.world_size == 1) {
    c.local_world_size = 1;
    c.local_origin = c.world_origin;
  } else if (variables.has("SLURM_NTASKS_PER_NODE")) {
    TESSERA_ASSIGN_OR_RETURN(c.local_world_size, variables.number(kSlurm, "SLURM_NTASKS_PER_NODE", 1, kMostRanks));
    c.local_origin = "SLURM_NTASKS_PER_NODE";
  } else if (!other.empty()) {
    return launcher_error(fmt::format("{} does not add up to {}={} (Slurm). [T0464] hint: give srun --ntasks-per-node",
                                      other, c.world_origin, c.world_size));
  }
  return absl::OkStatus();
}

/// Returns whether this process is a batch script. A process is a Slurm task if srun started it. An allocation alone
/// (salloc) sets no SLURM_PROCID. The batch script is rank 0 of a separate step, which SLURM_NTASKS does not count.
bool is_batch_script(const LauncherVariables& variables) {
  return variables.text("ENVIRONMENT") == "BATCH" && !variables.has("SLURM_STEP_ID") && !variables.has("SLURM_STEPID");
}

absl::StatusOr<std::optional<Candidate>> read_slurm(const LauncherVariables& variables) {
  const Dialect& d = kSlurm;
  if (!variables.has(d.rank) || is_batch_script(variables)) return std::optional<Candidate>();
  const char* tasks = tasks_variable(variables);
  if (!variables.has(tasks) || !variables.has(d.local_rank))
    return partial_error(variables, d, {d.rank, tasks, d.local_rank});
  TESSERA_ASSIGN_OR_RETURN(Candidate c, read_numbers(variables, d, tasks));
  TESSERA_RETURN_IF_ERROR(read_slurm_local_size(variables, c));
  TESSERA_RETURN_IF_ERROR(check_ranges(c));
  if (c.knows_locals() && variables.has("SLURM_NODEID")) {
    TESSERA_ASSIGN_OR_RETURN(const int node, variables.number(d, "SLURM_NODEID", 0, kMostRanks));
    const int host = c.topology().host;
    if (node != host)
      return launcher_error(
          fmt::format("SLURM_NODEID={} but SLURM_PROCID={} with {}={} lies on host {} (Slurm): ranks "
                      "count host by host. [T0465] hint: for that {}",
                      node, c.rank, c.local_origin, c.local_world_size, host, d.order_hint));
  }
  return std::optional<Candidate>(c);
}

// ------------------------------------------------------------------------------------------- which launcher counts

/// Returns whether two launchers describe this process in the same way. A process group has found out which ranks share
/// a host. A launcher may give different hosts, as `tessera launch --pretend-hosts 2` does.
bool agree(const Candidate& a, const Candidate& b) {
  const bool of_group = a.dialect == &kProcessGroup || b.dialect == &kProcessGroup;
  const bool locals = of_group || !a.knows_locals() || !b.knows_locals() ||
                      (a.local_rank == b.local_rank && a.local_world_size == b.local_world_size);
  return a.rank == b.rank && a.world_size == b.world_size && locals;
}

/// Returns true if `outer` only started one agent on each host (or one agent in all), and the agents then started the
/// ranks that `inner` counts. Examples are torchrun, mpirun or `tessera launch` inside an allocation, and `mp.spawn`
/// inside any launcher. torchrun may continue with fewer hosts than Slurm gave it, so the values of its own agent are
/// accepted; exported RANK and WORLD_SIZE are not accepted. The hosts of a process group may not be known yet. Each
/// agent then counts as one host that has at least one rank, and ranks are in the order of the agents.
bool is_agent_of(const Candidate& outer, const Candidate& inner, bool torchrun_agent) {
  if (outer.dialect->outerness <= inner.dialect->outerness) return false;
  if (inner.world_size == 1 && outer.world_size > 1) return false;  // a WORLD_SIZE=1 that an earlier program set
  if (outer.world_size == 1) return true;
  if (inner.dialect == &kProcessGroup) {
    const int agents = outer.world_size;
    if (outer.local_world_size > 1) return false;
    if (!inner.ranks_of_hosts.empty())
      return static_cast<int>(inner.ranks_of_hosts.size()) == agents && inner.topology().host == outer.rank;
    if (!inner.knows_locals()) return inner.rank >= outer.rank && inner.world_size - inner.rank >= agents - outer.rank;
    return inner.world_size % agents == 0 && inner.rank / (inner.world_size / agents) == outer.rank;
  }
  if (outer.local_world_size != 1 || !inner.knows_locals()) return false;
  const bool trusted = inner.dialect == &kTorchrun && torchrun_agent;
  // Open MPI's daemons on the other hosts are a Slurm step without the first host.
  const int hosts = inner.topology().num_hosts();
  return trusted || outer.world_size == hosts || (inner.dialect != &kTorchrun && outer.world_size == hosts - 1);
}

std::string say(const Candidate& c) {
  return fmt::format("{}={}, {}={} ({})", c.dialect->rank, c.rank, c.world_origin, c.world_size, c.dialect->title);
}

absl::Status disagree(const Candidate& a, const Candidate& b) {
  const std::string text = fmt::format("two launchers disagree: {}, but {}", say(a), say(b));
  return launcher_error(
      b.dialect == &kProcessGroup
          ? text +
                fmt::format(
                    ". [T0466] hint: give init_process_group the rank and world_size of {0}, or unset {0}'s variables",
                    a.dialect->title)
          : text + ". [T0467] hint: unset the variables of the one that did not start this program");
}

absl::Status refuse_batch_script(const LauncherVariables& variables) {
  const std::string tasks = variables.text("SLURM_NTASKS").value_or("1");
  if (!is_batch_script(variables) || tasks == "1") return absl::OkStatus();
  return launcher_error(
      fmt::format("this is the batch script of a Slurm job with SLURM_NTASKS={}, not one of its "
                  "tasks. [T0468] hint: start the program with srun, or with `tessera launch`",
                  tasks));
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
      return disagree(best, next);
    }
  }
  return best;
}

absl::StatusOr<std::vector<Candidate>> read_candidates(const LauncherVariables& variables) {
  std::vector<Candidate> found;
  TESSERA_ASSIGN_OR_RETURN(auto torchrun, read_torchrun(variables));
  if (torchrun) found.push_back(*torchrun);
  TESSERA_ASSIGN_OR_RETURN(auto slurm, read_slurm(variables));
  if (slurm) found.push_back(*slurm);
  for (const Dialect& dialect : kMpi) {
    TESSERA_ASSIGN_OR_RETURN(auto mpi, read_dialect(variables, dialect));
    if (mpi) found.push_back(*mpi);
  }
  TESSERA_ASSIGN_OR_RETURN(auto for_python, read_dialect(variables, kMpiForPython));
  if (for_python && for_python->world_size > 1) found.push_back(*for_python);
  TESSERA_ASSIGN_OR_RETURN(auto group, read_dialect(variables, kProcessGroup));
  if (group) found.push_back(*group);
  return found;
}

}  // namespace

absl::Status launcher_error(std::string message) {
  message = clipped(message, kLongestError);
  if (message.find("hint:") == std::string::npos)
    message +=
        ". [T0469] hint: the launcher sets these variables (torchrun, srun, mpirun or `tessera launch`): start the "
        "program through it, or unset them for one rank";
  return make_error(ExitCode::kConfig, std::move(message));
}

absl::Status partial_error(const LauncherVariables& variables, const Dialect& d,
                           const std::vector<const char*>& wanted) {
  std::string set, missing;
  for (const char* name : wanted) {
    if (auto value = variables.text(name)) {
      set += fmt::format("{}{}={}", set.empty() ? "" : ", ", name, clipped(*value, kLongestValue));
    } else {
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", name);
    }
  }
  return launcher_error(
      fmt::format("only a part of {}'s variables is set: {} without {}. [T0470] hint: start the program with "
                  "torchrun, srun, mpirun or `tessera launch`, or unset them for one rank",
                  d.title, set, missing));
}

std::optional<std::string> LauncherVariables::text(const std::string& name) const {
  auto value = name.empty() ? std::nullopt : environment_(name);
  return value && !value->empty() ? value : std::nullopt;
}

absl::StatusOr<int> LauncherVariables::number(const Dialect& dialect, const std::string& name, int low,
                                              int high) const {
  const std::string value = text(name).value_or("");
  int result = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size() || result < low || result > high)
    return launcher_error(fmt::format("{}={} ({}): want a whole number from {} to {}", name,
                                      clipped(value, kLongestValue), dialect.title, low, high));
  return result;
}

absl::StatusOr<std::vector<int>> LauncherVariables::ranks_of_hosts(const std::string& name) const {
  const std::string list = text(name).value_or("");
  if (list.find_first_of(",(") == std::string::npos) return std::vector<int>();
  if (auto ranks = parse_ranks_of_hosts(list)) return *std::move(ranks);
  return launcher_error(
      fmt::format("{}={}: want the ranks of each host, such as 2,3. [T0983] hint: write a number above 0 for "
                  "each host, in their order",
                  name, clipped(list, kLongestValue)));
}

Topology Candidate::topology() const {
  Topology topology = ranks_of_hosts.empty() ? Topology() : on_hosts(*this, ranks_of_hosts);
  if (ranks_of_hosts.empty()) {
    topology.rank = rank;
    topology.world_size = world_size;
    topology.local_world_size = local_world_size;
    topology.host = rank / local_world_size;
    topology.local_rank = rank % local_world_size;
  }
  topology.launcher = dialect->launcher;
  return topology;
}

absl::StatusOr<std::optional<Candidate>> find_launcher(const LauncherVariables& variables) {
  TESSERA_ASSIGN_OR_RETURN(const auto candidates, read_candidates(variables));
  if (candidates.empty()) {
    TESSERA_RETURN_IF_ERROR(refuse_batch_script(variables));
    return std::nullopt;
  }
  TESSERA_ASSIGN_OR_RETURN(const Candidate chosen, choose(candidates, variables.has("TORCHELASTIC_RUN_ID")));
  return std::optional<Candidate>(chosen);
}

}  // namespace tessera
