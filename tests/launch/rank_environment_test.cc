// Tests the environment variables that the launcher gives to ranks.

#include "workshop/launch/rank_environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <utility>

#include "runtime/comm/resolve_topology.h"
#include "workshop/launch/launcher.h"

namespace tessera {
namespace {

using ::testing::Contains;
using ::testing::Not;

absl::StatusOr<Topology> resolve(const std::vector<std::string>& environment) {
  std::map<std::string, std::string> variables;
  for (const auto& entry : environment) variables[entry.substr(0, entry.find('='))] = entry.substr(entry.find('=') + 1);
  return resolve_topology([&](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

TEST(RankEnvironment, StrictOptionSetsTesseraStrict) {
  LaunchOptions options;
  EXPECT_THAT(rank_environment(options, {}, 0, {}), Not(Contains("TESSERA_STRICT=1")));
  EXPECT_THAT(rank_environment(options, {}, 0, {"TESSERA_STRICT=1"}), Contains("TESSERA_STRICT=1"));
  options.switches.strict = true;
  EXPECT_THAT(rank_environment(options, {}, 0, {"TESSERA_STRICT=0"}), Contains("TESSERA_STRICT=1"));
}

TEST(RankEnvironment, ARankWithoutItsVariablesIsAJobOfOneRank) {
  LaunchOptions options;
  options.ranks = 3;
  const std::vector<std::string> slurm = {"SLURM_PROCID=2", "SLURM_NTASKS=3", "SLURM_LOCALID=2", "HOME=/root"};
  const std::vector<std::string> rank = rank_environment(options, {}, 2, slurm);
  EXPECT_THAT(rank, Contains("WORLD_SIZE=3"));
  const auto alone = resolve(without_rank(rank));
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ(alone->launcher, "single");
  EXPECT_THAT(without_rank(rank), Contains("HOME=/root"));
}

TEST(RankEnvironment, WorkerThatComesAndGoesIsAJobOfOneRank) {
  LaunchOptions options;
  options.ranks = 3;
  options.workers = {1, 3};
  const std::vector<std::string> environment = rank_environment(options, {}, 2, {"TESSERA_HOSTS=1,2"});
  EXPECT_THAT(environment, Contains("TESSERA_WORKER=2"));
  const auto topology = resolve(environment);
  ASSERT_TRUE(topology.ok()) << topology.status();
  EXPECT_EQ(topology->rank, 0);
  EXPECT_EQ(topology->world_size, 1);
  options.workers = {};
  EXPECT_THAT(rank_environment(options, {}, 2, {"TESSERA_WORKER=2"}), Not(Contains("TESSERA_WORKER=2")))
      << "a job that a worker starts";
}

/// `resolve_topology` understands the launcher's variables, in whatever way the launcher was started.
TEST(RankEnvironment, VariablesAreUnderstoodInsideOtherLaunchers) {
  const std::vector<std::vector<std::string>> around = {
      {},
      {"SLURM_JOB_ID=7", "SLURM_NTASKS=4", "SLURM_JOB_NODELIST=n[1-2]"},
      {"SLURM_JOB_ID=7", "SLURM_NTASKS=1", "SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURM_STEP_ID=0"},
      {"RANK=9", "WORLD_SIZE=2", "TORCHELASTIC_USE_AGENT_STORE=True"},
      {"TESSERA_HOSTS=2"}};
  for (const auto& inherited : around) {
    for (const int hosts : {1, 2, 3}) {
      JobSettings job;
      job.port = 4321;
      job.run_id = "x";
      LaunchOptions options;
      options.ranks = 6;
      options.pretended_hosts.assign(static_cast<std::size_t>(hosts), 6 / hosts);
      const bool pretended_around = hosts == 1 && inherited == around.back();
      const int expected_hosts = pretended_around ? 2 : hosts;
      for (int rank = 0; rank < 6; ++rank) {
        const auto topology = resolve(rank_environment(options, job, rank, inherited));
        ASSERT_TRUE(topology.ok()) << topology.status();
        EXPECT_EQ(topology->launcher, "tessera");
        EXPECT_EQ(topology->rank, rank);
        EXPECT_EQ(topology->world_size, 6);
        EXPECT_EQ(topology->num_hosts(), expected_hosts);
        EXPECT_EQ(topology->host, rank / (6 / expected_hosts));
        EXPECT_EQ(topology->master_port, 4321);
        EXPECT_EQ(topology->master_addr, "127.0.0.1");
        EXPECT_EQ(topology->run_id, "x");
        EXPECT_FALSE(topology->agent_store);
      }
    }
  }
}

TEST(RankEnvironment, UnequalHostsAreUnderstoodByEveryRank) {
  LaunchOptions options;
  options.ranks = 6;
  options.pretended_hosts = {2, 3, 1};
  JobSettings job;
  job.port = 4321;
  const std::vector<std::pair<int, int>> places = {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {1, 2}, {2, 0}};
  for (int rank = 0; rank < 6; ++rank) {
    const auto topology = resolve(rank_environment(options, job, rank, {"TESSERA_HOSTS=2"}));
    ASSERT_TRUE(topology.ok()) << topology.status();
    EXPECT_EQ(std::pair(topology->host, topology->local_rank), places[static_cast<std::size_t>(rank)]) << rank;
    EXPECT_EQ(topology->local_world_size, options.pretended_hosts[static_cast<std::size_t>(topology->host)]);
    EXPECT_EQ(topology->num_hosts(), 3);
    EXPECT_EQ(topology->ranks_of_hosts, options.pretended_hosts);
  }
}

TEST(RankEnvironment, InheritedVariablesStayUnlessTheLauncherSetsThem) {
  const LaunchOptions options;
  JobSettings job;
  job.omp_threads = 3;
  job.error_directory = "/d";
  EXPECT_THAT(rank_environment(options, job, 0, {"A=b=c", "EMPTY="}), Contains("A=b=c"));
  EXPECT_THAT(rank_environment(options, job, 0, {"EMPTY="}), Contains("EMPTY="));
  EXPECT_THAT(rank_environment(options, job, 0, {}), Contains("OMP_NUM_THREADS=3"));
  EXPECT_THAT(rank_environment(options, job, 0, {"OMP_NUM_THREADS=8"}), Contains("OMP_NUM_THREADS=8"));
  EXPECT_THAT(rank_environment(options, job, 0, {"RANK=5"}), Not(Contains("RANK=5")));
  EXPECT_THAT(rank_environment(options, job, 2, {}), Contains("TORCHELASTIC_ERROR_FILE=/d/rank_2.json"));
}

}  // namespace
}  // namespace tessera
