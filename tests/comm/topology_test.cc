// Tests how a rank learns its place in the job from the variables of its launcher (torchrun, Slurm, MPI).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/resolve_topology.h"

namespace tessera {
namespace {

using Variables = std::map<std::string, std::string>;
using ::testing::HasSubstr;

absl::StatusOr<Topology> resolve(const Variables& variables) {
  return resolve_topology([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

/// Returns `base` with `changes` added. An empty value removes a variable.
Variables with(Variables base, const Variables& changes) {
  for (const auto& [name, value] : changes) {
    if (value.empty())
      base.erase(name);
    else
      base[name] = value;
  }
  return base;
}

const Variables kTorchrun = {{"RANK", "5"},
                             {"WORLD_SIZE", "8"},
                             {"LOCAL_RANK", "1"},
                             {"GROUP_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "4"},
                             {"MASTER_ADDR", "node0"},
                             {"MASTER_PORT", "1234"},
                             {"TORCHELASTIC_RUN_ID", "abc"},
                             {"TORCHELASTIC_RESTART_COUNT", "2"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kSlurm = {{"SLURM_PROCID", "5"},
                          {"SLURM_NTASKS", "8"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NODEID", "1"},
                          {"SLURM_TASKS_PER_NODE", "4(x2)"},
                          {"SLURM_JOB_ID", "77"},
                          {"SLURM_STEP_ID", "0"},
                          {"SLURM_JOB_NODELIST", "node[03-05,9],x1"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
const Variables kPmi = {
    {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}, {"MASTER_ADDR", "first"}};
const Variables kMvapich = {{"MV2_COMM_WORLD_RANK", "3"},
                            {"MV2_COMM_WORLD_SIZE", "4"},
                            {"MV2_COMM_WORLD_LOCAL_RANK", "3"},
                            {"MV2_COMM_WORLD_LOCAL_SIZE", "4"}};

/// The variables of an allocation, as salloc gives them to a shell that is no task.
const Variables kAllocation = {{"SLURM_JOB_ID", "77"},
                               {"SLURM_NTASKS", "8"},
                               {"SLURM_TASKS_PER_NODE", "4(x2)"},
                               {"SLURM_JOB_NODELIST", "node[03-04]"}};
/// The variables of an allocation inside the batch script.
const Variables kBatch =
    with(kAllocation, {{"ENVIRONMENT", "BATCH"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"}});

TEST(Topology, NoLauncherGivesOneRank) {
  const auto topology = resolve({});
  ASSERT_TRUE(topology.ok());
  EXPECT_EQ(topology->describe(), "rank 0/1 (single), host 0, local rank 0");
  EXPECT_EQ(topology->num_hosts(), 1);
}

TEST(Topology, TorchrunsVariablesAreRead) {
  const auto topology = resolve(kTorchrun);
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->describe(), "rank 5/8 (torchrun), host 1, local rank 1");
  EXPECT_EQ(topology->local_world_size, 4);
  EXPECT_EQ(topology->num_hosts(), 2);
  EXPECT_EQ(topology->master_addr, "node0");
  EXPECT_EQ(topology->master_port, 1234);
  EXPECT_EQ(topology->run_id, "abc");
  EXPECT_EQ(topology->restart_count, 2);
  EXPECT_TRUE(topology->agent_store);
}

TEST(Topology, TesseraLaunchIsReadLikeTorchrun) {
  const auto topology =
      resolve(with(kTorchrun, {{"TESSERA_LAUNCHER", "tessera"}, {"TORCHELASTIC_USE_AGENT_STORE", ""}}));
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->launcher, "tessera");
  EXPECT_FALSE(topology->agent_store);
}

TEST(Topology, SlurmsVariablesAreRead) {
  const auto topology = resolve(kSlurm);
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->describe(), "rank 5/8 (slurm), host 1, local rank 1");
  EXPECT_EQ(topology->master_addr, "node03");
  EXPECT_EQ(topology->run_id, "77.0");
  EXPECT_GE(topology->master_port, 15000);
  EXPECT_LT(topology->master_port, 25000);
  EXPECT_EQ(topology->master_port,
            resolve(with(kSlurm, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"}}))->master_port);
  EXPECT_NE(topology->master_port, resolve(with(kSlurm, {{"SLURM_JOB_ID", "78"}}))->master_port);
}

TEST(Topology, SlurmTasksPerNodeAreReadInEachFormOrRefused) {
  const Variables bare = with(kSlurm, {{"SLURM_TASKS_PER_NODE", ""}});
  EXPECT_EQ(resolve(with(bare, {{"SLURM_NTASKS_PER_NODE", "4"}}))->num_hosts(), 2);
  EXPECT_EQ(resolve(with(bare, {{"SLURM_STEP_TASKS_PER_NODE", "4,4"}}))->num_hosts(), 2);
  // sbatch was given 8 tasks per node, and the srun inside it was given 4.
  EXPECT_EQ(
      resolve(with(bare, {{"SLURM_TASKS_PER_NODE", "8(x2)"}, {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"}}))->num_hosts(), 2);
  EXPECT_THAT(message_of(resolve(bare).status()), HasSubstr("SLURM_TASKS_PER_NODE"));
  for (const char* wrong : {"4(x3)", "4(x2", "x", "4(x0)", "4,", "0(x2)", "4(x99999999)"}) {
    const auto status = resolve(with(bare, {{"SLURM_TASKS_PER_NODE", wrong}})).status();
    EXPECT_EQ(exit_code_of(status), ExitCode::kConfig) << wrong;
    EXPECT_THAT(message_of(status), HasSubstr(std::string("SLURM_TASKS_PER_NODE=") + wrong));
  }
}

TEST(Topology, UnequalHostsAreReadFromSlurmsList) {
  const Variables unequal = with(kSlurm, {{"SLURM_TASKS_PER_NODE", "2(x2),4"}, {"SLURM_NODEID", "2"}});
  const auto topology = resolve(unequal);
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->describe(), "rank 5/8 (slurm), host 2, local rank 1");
  EXPECT_EQ(topology->local_world_size, 4);
  EXPECT_EQ(topology->num_hosts(), 3);
  EXPECT_FALSE(topology->has_equal_hosts());
  EXPECT_EQ(topology->host_of(3), 1);
  EXPECT_TRUE(topology->hosts_hold_whole_groups_of(2));
  EXPECT_FALSE(topology->hosts_hold_whole_groups_of(4));
  EXPECT_THAT(message_of(resolve(with(unequal, {{"SLURM_TASKS_PER_NODE", "5,3"}})).status()),
              HasSubstr("count host by host"));
}

/// torchrun and MPI tell each rank only the number of ranks on its own host.
TEST(Topology, UnequalHostsOfTorchrunNeedTheirList) {
  struct Place {
    const char *rank, *local_rank, *local_world_size, *group;
  };
  for (const Place& place : {Place{"1", "1", "2", "0"}, Place{"2", "0", "3", "1"}, Place{"4", "2", "3", "1"}}) {
    const Variables variables = with(kTorchrun, {{"RANK", place.rank},
                                                 {"WORLD_SIZE", "5"},
                                                 {"LOCAL_RANK", place.local_rank},
                                                 {"LOCAL_WORLD_SIZE", place.local_world_size},
                                                 {"GROUP_RANK", place.group}});
    EXPECT_THAT(message_of(resolve(variables).status()), HasSubstr("TESSERA_HOSTS=2,3"));
    for (const char* name : {"TESSERA_HOSTS", "ranks of each host of torch.distributed"}) {
      const auto topology = resolve(with(variables, {{name, "2,3"}}));
      ASSERT_TRUE(topology.ok()) << topology.status();
      EXPECT_EQ(std::to_string(topology->host), place.group);
      EXPECT_EQ(std::to_string(topology->local_rank), place.local_rank);
      EXPECT_EQ(std::to_string(topology->local_world_size), place.local_world_size);
      EXPECT_EQ(topology->num_hosts(), 2);
    }
    EXPECT_FALSE(resolve(with(variables, {{"TESSERA_HOSTS", "3,2"}})).ok()) << place.rank;
  }
}

/// The step's number of tasks counts, and not that of the job: salloc's shell is a step of one task in a job of many
/// tasks.
TEST(Topology, SlurmStepsTasksGoBeforeTheJobs) {
  const Variables shell = {
      {"SLURM_PROCID", "0"},         {"SLURM_NTASKS", "4"},          {"SLURM_LOCALID", "0"},
      {"SLURM_NODEID", "0"},         {"SLURM_STEP_NUM_TASKS", "1"},  {"SLURM_STEP_ID", "4294967290"},
      {"SLURM_TASKS_PER_NODE", "4"}, {"SLURM_NTASKS_PER_NODE", "4"}, {"SLURM_JOB_ID", "77"}};
  const auto topology = resolve(shell);
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->describe(), "rank 0/1 (slurm), host 0, local rank 0");
  const auto list = resolve(with(shell, {{"SLURM_STEP_TASKS_PER_NODE", "1"}}));
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ(list->world_size, 1);
  const auto two = resolve(with(kSlurm, {{"SLURM_NTASKS", "16"}, {"SLURM_STEP_NUM_TASKS", "8"}}));
  ASSERT_TRUE(two.ok()) << two.status();
  EXPECT_EQ(two->world_size, 8);
  // The ranks of MPI are started inside the shell of salloc.
  const auto inside = resolve(with(shell, kOpenMpi));
  ASSERT_TRUE(inside.ok()) << inside.status();
  EXPECT_EQ(inside->launcher, "openmpi");
  EXPECT_THAT(message_of(resolve(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "5"}})).status()),
              HasSubstr("SLURM_STEP_NUM_TASKS=5"));
}

/// Returns the variables by which Python describes its process group.
Variables group(const std::string& rank, const std::string& size) {
  return {{"torch.distributed.get_rank()", rank}, {"torch.distributed.get_world_size()", size}};
}

Variables group_on_hosts(const std::string& rank, const std::string& size, const std::string& local_size) {
  const int local = std::stoi(rank) % std::stoi(local_size);
  return with(group(rank, size), {{"this process among its host's", std::to_string(local)},
                                  {"ranks on its host", local_size},
                                  {"host of torch.distributed's store", "node0"},
                                  {"port of torch.distributed's store", "4321"}});
}

TEST(Topology, TorchProcessGroupAloneGivesRankAndHosts) {
  EXPECT_EQ(resolve(group("1", "2"))->describe(), "rank 1/2 (torch.distributed), host 0, local rank 1");
  const auto topology = resolve(with(group_on_hosts("5", "8", "4"), {{"MASTER_PORT", "1"}}));
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->describe(), "rank 5/8 (torch.distributed), host 1, local rank 1");
  EXPECT_EQ(topology->master_addr, "node0");
  EXPECT_EQ(topology->master_port, 4321);
  EXPECT_TRUE(topology->agent_store);
}

TEST(Topology, FirstNodeOfASlurmListIsTheMaster) {
  const std::map<std::string, std::string> first = {{"node[03-05,9],x1", "node03"},
                                                    {"alone", "alone"},
                                                    {"a,b", "a"},
                                                    {"n[7,9-11]", "n7"},
                                                    {"r[1-2]n[07-09]", "r1n07"},
                                                    {"gpu-1-[2-3]", "gpu-1-2"},
                                                    {"h[010]-ib,z", "h010-ib"}};
  for (const auto& [list, host] : first)
    EXPECT_EQ(resolve(with(kSlurm, {{"SLURM_JOB_NODELIST", list}}))->master_addr, host);
  EXPECT_EQ(resolve(with(kSlurm, {{"SLURM_STEP_NODELIST", "node04"}}))->master_addr, "node04");
  EXPECT_EQ(resolve(with(kSlurm, {{"MASTER_ADDR", "mine"}}))->master_addr, "mine");
  for (const char* wrong : {"", "node[03-", ",a"})
    EXPECT_THAT(message_of(resolve(with(kSlurm, {{"SLURM_JOB_NODELIST", wrong}})).status()),
                HasSubstr("SLURM_JOB_NODELIST="));
}

TEST(Topology, OpenMpiPmiAndMvapichVariablesAreRead) {
  EXPECT_EQ(resolve(kOpenMpi)->describe(), "rank 3/4 (openmpi), host 0, local rank 3");
  EXPECT_EQ(resolve(kPmi)->describe(), "rank 3/4 (pmi), host 1, local rank 1");
  EXPECT_EQ(resolve(kMvapich)->describe(), "rank 3/4 (mvapich2), host 0, local rank 3");
  EXPECT_EQ(resolve(kOpenMpi)->master_addr, "127.0.0.1");
  // MVAPICH2's process manager uses PMI too, but it does not give local ranks.
  EXPECT_EQ(resolve(with(kMvapich, {{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}}))->launcher, "mvapich2");
}

TEST(Topology, SeveralHostsNeedAnAddress) {
  for (const Variables& set : {kTorchrun, kPmi}) {
    const auto status = resolve(with(set, {{"MASTER_ADDR", ""}})).status();
    EXPECT_EQ(exit_code_of(status), ExitCode::kConfig);
    EXPECT_THAT(message_of(status), HasSubstr("MASTER_ADDR"));
  }
}

struct Refusal {
  const char* name;
  Variables variables;
  std::vector<std::string> said;  ///< texts that the message must contain
};

TEST(Topology, ContradictoryVariablesAreRefusedByName) {
  const std::vector<Refusal> table = {
      {"rank = world", with(kTorchrun, {{"RANK", "8"}}), {"RANK=8", "WORLD_SIZE=8", "torchrun"}},
      {"negative rank", with(kTorchrun, {{"RANK", "-1"}}), {"RANK=-1", "torchrun"}},
      {"no number", with(kTorchrun, {{"WORLD_SIZE", "eight"}}), {"WORLD_SIZE=eight"}},
      {"trailing text", with(kTorchrun, {{"WORLD_SIZE", "8 "}}), {"WORLD_SIZE=8 "}},
      {"fraction", with(kTorchrun, {{"LOCAL_RANK", "1.0"}}), {"LOCAL_RANK=1.0"}},
      {"overflow", with(kTorchrun, {{"WORLD_SIZE", "4294967297"}}), {"WORLD_SIZE=4294967297"}},
      {"empty world", with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE=0"}},
      {"local rank too large", with(kTorchrun, {{"LOCAL_RANK", "4"}}), {"LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4"}},
      {"host larger than world",
       with(kTorchrun, {{"LOCAL_WORLD_SIZE", "16"}}),
       {"LOCAL_WORLD_SIZE=16", "WORLD_SIZE=8"}},
      {"uneven hosts", with(kTorchrun, {{"LOCAL_WORLD_SIZE", "3"}}), {"LOCAL_WORLD_SIZE=3"}},
      {"not by host", with(kTorchrun, {{"LOCAL_RANK", "2"}}), {"RANK=5", "LOCAL_RANK=2"}},
      {"other host", with(kTorchrun, {{"GROUP_RANK", "0"}}), {"GROUP_RANK=0"}},
      {"partial: world", {{"WORLD_SIZE", "4"}}, {"WORLD_SIZE=4", "without RANK", "LOCAL_RANK"}},
      {"partial: rank", {{"RANK", "0"}}, {"RANK=0", "WORLD_SIZE"}},
      {"partial: locals", {{"RANK", "0"}, {"WORLD_SIZE", "2"}}, {"without LOCAL_RANK, LOCAL_WORLD_SIZE"}},
      {"port", with(kTorchrun, {{"MASTER_PORT", "70000"}}), {"MASTER_PORT=70000", "65535"}},
      {"port 0 with peers", with(kTorchrun, {{"MASTER_PORT", "0"}}), {"MASTER_PORT=0"}},
      {"agent store", with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "maybe"}}), {"=maybe"}},
      {"launcher name", with(kTorchrun, {{"TESSERA_LAUNCHER", "other"}}), {"TESSERA_LAUNCHER=other"}},
      {"slurm rank", with(kSlurm, {{"SLURM_PROCID", "9"}}), {"SLURM_PROCID=9", "SLURM_NTASKS=8", "Slurm"}},
      {"slurm partial", with(kSlurm, {{"SLURM_NTASKS", ""}}), {"without SLURM_NTASKS"}},
      {"slurm cyclic", with(kSlurm, {{"SLURM_LOCALID", "2"}}), {"SLURM_LOCALID=2", "--distribution=block"}},
      {"slurm node", with(kSlurm, {{"SLURM_NODEID", "0"}}), {"SLURM_NODEID=0"}},
      {"batch script of 8", kBatch, {"SLURM_NTASKS=8", "srun"}},
      {"openmpi partial", {{"OMPI_COMM_WORLD_RANK", "0"}}, {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE"}},
      {"openmpi locals", with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", ""}}), {"OMPI_COMM_WORLD_LOCAL_RANK"}},
      {"openmpi by node",
       with(kOpenMpi, {{"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}}),
       {"OMPI_COMM_WORLD_RANK=3", "--map-by"}},
      {"pmi rank", with(kPmi, {{"PMI_RANK", "4"}}), {"PMI_RANK=4", "PMI"}},
      {"pmi without locals", with(kPmi, {{"MPI_LOCALRANKID", ""}}), {"MPI_LOCALRANKID"}},
      {"slurm and a group", with(kSlurm, group("3", "4")), {"torch.distributed.get_rank()=3", "get_world_size()=4"}},
      {"torchrun and a group of one", with(kTorchrun, group("0", "1")), {"RANK=5, WORLD_SIZE=8", "init_process_group"}},
      {"mpi4py alone",
       {{"MPI.COMM_WORLD.rank", "1"}, {"MPI.COMM_WORLD.size", "2"}},
       {"MPI.COMM_WORLD.rank=1", "tessera launch"}},
  };
  for (const Refusal& row : table) {
    const auto topology = resolve(row.variables);
    ASSERT_FALSE(topology.ok()) << row.name;
    EXPECT_EQ(exit_code_of(topology.status()), ExitCode::kConfig) << row.name;
    for (const auto& part : row.said) EXPECT_THAT(message_of(topology.status()), HasSubstr(part)) << row.name;
  }
}

/// One launcher inside another, and the launcher whose variables are used.
struct Nesting {
  const char* name;
  Variables inner, outer;
  const char* launcher;  ///< nullptr means that both are refused
};

TEST(Topology, NestedLaunchersAreOrderedOrRefused) {
  const Variables four = {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "4"}};
  const Variables one_task = {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_LOCALID", "0"}};
  const Variables task_a_host =
      with(kSlurm,
           {{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "0"}, {"SLURM_TASKS_PER_NODE", "1(x2)"}});
  const Variables three_hosts = with(kSlurm, {{"SLURM_PROCID", "2"},
                                              {"SLURM_NTASKS", "3"},
                                              {"SLURM_LOCALID", "0"},
                                              {"SLURM_NODEID", "2"},
                                              {"SLURM_TASKS_PER_NODE", "1(x3)"}});
  const Variables exported = with(kTorchrun, {{"TORCHELASTIC_RUN_ID", ""}});
  const Variables mpi_two_hosts = {{"OMPI_COMM_WORLD_RANK", "3"},
                                   {"OMPI_COMM_WORLD_SIZE", "4"},
                                   {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                   {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                   {"MASTER_ADDR", "node03"}};
  const Variables orted =
      with(task_a_host,
           {{"SLURM_PROCID", "0"}, {"SLURM_NODEID", "0"}, {"SLURM_NTASKS", "1"}, {"SLURM_TASKS_PER_NODE", "1"}});
  const Variables alone = {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}};
  const std::vector<Nesting> table = {
      {"torchrun in an allocation", four, kAllocation, "torchrun"},
      {"torchrun in the batch script", four, kBatch, "torchrun"},
      {"torchrun in one task", four, one_task, "torchrun"},
      {"torchrun, one agent a host", kTorchrun, task_a_host, "torchrun"},
      {"torchrun goes on without a host", kTorchrun, three_hosts, "torchrun"},
      {"exported, one agent a host", exported, task_a_host, "torchrun"},
      {"exported, hosts differ", exported, three_hosts, nullptr},
      {"exported from Slurm", exported, kSlurm, "torchrun"},
      {"a world of one, left over", alone, kSlurm, nullptr},
      {"worlds differ", four, kSlurm, nullptr},
      {"ranks differ", with(kTorchrun, {{"RANK", "4"}, {"LOCAL_RANK", "0"}}), kSlurm, nullptr},
      {"mpirun in an allocation", kOpenMpi, kAllocation, "openmpi"},
      {"mpirun in the batch script", kOpenMpi, kBatch, "openmpi"},
      {"mpirun in one task", kOpenMpi, one_task, "openmpi"},
      {"mpirun's daemons are a step", mpi_two_hosts, orted, "openmpi"},
      {"mpirun and Slurm differ", kOpenMpi, kSlurm, nullptr},
      {"torchrun and mpirun differ", kTorchrun, kOpenMpi, nullptr},
      {"srun with its PMI plug-in", {{"PMI_RANK", "5"}, {"PMI_SIZE", "8"}}, kSlurm, "slurm"},
      {"srun and another PMI", {{"PMI_RANK", "4"}, {"PMI_SIZE", "8"}}, kSlurm, nullptr},
      {"only an allocation", {}, kAllocation, "single"},
      {"a group under torchrun", group("5", "8"), kTorchrun, "torchrun"},
      {"a group and its hosts under torchrun", group_on_hosts("5", "8", "4"), kTorchrun, "torchrun"},
      {"a group that sees one host where torchrun has two", group_on_hosts("5", "8", "8"), kTorchrun, "torchrun"},
      {"a group of other ranks", group("4", "8"), kTorchrun, nullptr},
      {"a group of another size", group("5", "6"), kTorchrun, nullptr},
      {"a group that one process started", group("5", "8"), alone, "torch.distributed"},
      {"a group that one agent a host started", group("5", "8"), task_a_host, "torch.distributed"},
      {"a group that began on another host", group_on_hosts("3", "8", "4"), task_a_host, nullptr},
      {"RANK and WORLD_SIZE set for a group",
       {{"RANK", "5"}, {"WORLD_SIZE", "8"}},
       group_on_hosts("5", "8", "4"),
       "torch.distributed"},
      {"RANK and WORLD_SIZE count a group's hosts",
       {{"RANK", "1"}, {"WORLD_SIZE", "2"}},
       group_on_hosts("5", "8", "4"),
       "torch.distributed"},
      {"an import of mpi4py", {{"MPI.COMM_WORLD.rank", "0"}, {"MPI.COMM_WORLD.size", "1"}}, kTorchrun, "torchrun"},
      {"mpi4py under its launcher", {{"MPI.COMM_WORLD.rank", "3"}, {"MPI.COMM_WORLD.size", "4"}}, kOpenMpi, "openmpi"},
      {"mpi4py and torchrun", {{"MPI.COMM_WORLD.rank", "3"}, {"MPI.COMM_WORLD.size", "4"}}, kTorchrun, nullptr},
  };
  for (const Nesting& row : table) {
    const auto topology = resolve(with(row.outer, row.inner));
    ASSERT_EQ(topology.ok(), row.launcher != nullptr) << row.name << ": " << topology.status();
    if (row.launcher)
      EXPECT_EQ(topology->launcher, row.launcher) << row.name;
    else
      EXPECT_THAT(message_of(topology.status()), HasSubstr("disagree")) << row.name;
  }
}

TEST(Topology, PretendedHostsSplitOneHost) {
  Variables four = {{"WORLD_SIZE", "4"}, {"LOCAL_WORLD_SIZE", "4"}, {"TESSERA_HOSTS", "2"}};
  for (int rank = 0; rank < 4; ++rank) {
    four["RANK"] = four["LOCAL_RANK"] = std::to_string(rank);
    const auto topology = resolve(four);
    ASSERT_TRUE(topology.ok()) << topology.status();
    EXPECT_EQ(topology->host, rank / 2);
    EXPECT_EQ(topology->local_rank, rank % 2);
    EXPECT_EQ(topology->local_world_size, 2);
    EXPECT_EQ(topology->num_hosts(), 2);
    EXPECT_EQ(topology->master_addr, "127.0.0.1");
  }
  EXPECT_EQ(resolve(with(four, {{"TESSERA_HOSTS", "1,3"}}))->describe(), "rank 3/4 (torchrun), host 1, local rank 2");
  EXPECT_TRUE(resolve(with(four, {{"TESSERA_HOSTS", "2,2"}}))->has_equal_hosts());
  for (const char* wrong : {"3", "8", "0", "two", "2,3", "4,", "2,0,2"})
    EXPECT_THAT(message_of(resolve(with(four, {{"TESSERA_HOSTS", wrong}})).status()), HasSubstr("TESSERA_HOSTS"));
  EXPECT_TRUE(resolve(with(kTorchrun, {{"TESSERA_HOSTS", "2"}})).ok());   // the job has two hosts
  EXPECT_FALSE(resolve(with(kTorchrun, {{"TESSERA_HOSTS", "4"}})).ok());  // real hosts are not split
}

absl::StatusOr<std::pair<int, int>> rank_of(const Variables& variables) {
  return resolve_rank([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

/// torchrun's variables do not fit equal hosts here, and the process group has not found its hosts yet.
TEST(Topology, RankOfAProcessGroupNeedsNoHosts) {
  const Variables unequal = with(kTorchrun, {{"RANK", "3"}, {"WORLD_SIZE", "5"}, {"LOCAL_WORLD_SIZE", "3"}});
  const Variables with_group = with(unequal, group("3", "5"));
  EXPECT_FALSE(resolve(with_group).ok());
  const auto found = rank_of(with_group);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, (std::pair{3, 5}));
  EXPECT_THAT(message_of(rank_of(unequal).status()), HasSubstr("TESSERA_HOSTS=2,3")) << "no group will tell hosts";
  EXPECT_FALSE(rank_of(with(unequal, group("2", "5"))).ok());
  EXPECT_EQ(*rank_of(kSlurm), (std::pair{5, 8}));
  EXPECT_EQ(*rank_of({}), (std::pair{0, 1}));
}

/// `mp.spawn` starts one or two ranks under the first of two agents, and three ranks under the second agent.
TEST(Topology, GroupOfUnequalAgentsIsPlacedByItsHosts) {
  for (const int first : {2, 1}) {
    const std::string all = std::to_string(first + 3), of_first = std::to_string(first);
    for (int rank = 0; rank < first + 3; ++rank) {
      const std::string agent = rank < first ? "0" : "1", local = std::to_string(rank < first ? rank : rank - first);
      const Variables outer = with(kTorchrun, {{"RANK", agent},
                                               {"WORLD_SIZE", "2"},
                                               {"LOCAL_RANK", "0"},
                                               {"LOCAL_WORLD_SIZE", "1"},
                                               {"GROUP_RANK", agent}});
      const Variables bare = with(outer, group(std::to_string(rank), all));
      const auto early = rank_of(bare);
      ASSERT_TRUE(early.ok()) << early.status();
      EXPECT_EQ(*early, (std::pair{rank, first + 3}));
      const Variables hosts = with(bare, {{"this process among its host's", local},
                                          {"ranks on its host", rank < first ? of_first : "3"},
                                          {"ranks of each host of torch.distributed", of_first + ",3"}});
      const auto topology = resolve(hosts);
      ASSERT_TRUE(topology.ok()) << topology.status();
      EXPECT_EQ(topology->describe(), "rank " + std::to_string(rank) + "/" + all + " (torch.distributed), host " +
                                          agent + ", local rank " + local);
      const std::string other = rank < first ? "1" : "0";
      EXPECT_FALSE(resolve(with(hosts, {{"RANK", other}, {"GROUP_RANK", other}})).ok()) << rank;
    }
  }
  EXPECT_FALSE(resolve(with(with(kTorchrun, {{"RANK", "1"},
                                             {"WORLD_SIZE", "2"},
                                             {"LOCAL_RANK", "0"},
                                             {"LOCAL_WORLD_SIZE", "1"},
                                             {"GROUP_RANK", "1"}}),
                            group("0", "5")))
                   .ok());
}

/// Each rank has its own place on the hosts, under every launcher and in every even layout.
TEST(Topology, RanksTileHostsUnderEveryLauncher) {
  for (int hosts = 1; hosts <= 4; ++hosts) {
    for (int local = 1; local <= 4; ++local) {
      std::set<std::pair<int, int>> places;
      for (int rank = 0; rank < hosts * local; ++rank) {
        const auto text = [](int value) { return std::to_string(value); };
        const auto topology = resolve({{"SLURM_PROCID", text(rank)},
                                       {"SLURM_NTASKS", text(hosts * local)},
                                       {"SLURM_LOCALID", text(rank % local)},
                                       {"SLURM_NODEID", text(rank / local)},
                                       {"SLURM_TASKS_PER_NODE", text(local) + "(x" + text(hosts) + ")"},
                                       {"SLURM_JOB_NODELIST", "n[1-4]"}});
        ASSERT_TRUE(topology.ok()) << topology.status();
        EXPECT_EQ(topology->num_hosts(), hosts);
        places.emplace(topology->host, topology->local_rank);
      }
      EXPECT_EQ(places.size(), static_cast<std::size_t>(hosts * local));
    }
  }
}

}  // namespace
}  // namespace tessera
