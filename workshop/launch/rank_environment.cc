#include "workshop/launch/rank_environment.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "runtime/base/seeded_fault.h"
#include "workshop/launch/launcher.h"

namespace tessera {

std::vector<std::string> rank_environment(const LaunchOptions& options, const JobSettings& job, int rank,
                                          const std::vector<std::string>& inherited) {
  const bool is_worker = options.workers.most > 0;  // each worker is a job of its own
  const std::vector<int> hosts = is_worker ? std::vector<int>{1} : ranks_of_hosts(options);
  const int own = is_worker ? 0 : rank;
  std::size_t host = 0;
  int first = 0;  // first rank of this rank's host
  while (host + 1 < hosts.size() && first + hosts[host] <= own) first += hosts[host++];
  const auto text = [](int number) { return std::to_string(number); };
  std::map<std::string, std::string, std::less<>> variables = {{"OMP_NUM_THREADS", text(job.omp_threads)}};
  for (const std::string& entry : inherited) {
    const auto equals = entry.find('=');
    if (equals != std::string::npos) variables.insert_or_assign(entry.substr(0, equals), entry.substr(equals + 1));
  }
  const std::map<std::string, std::string> ours = {{"RANK", text(own)},
                                                   {"WORLD_SIZE", text(is_worker ? 1 : options.ranks)},
                                                   {"LOCAL_RANK", text(own - first)},
                                                   {"LOCAL_WORLD_SIZE", text(hosts[host])},
                                                   {"GROUP_RANK", text(static_cast<int>(host))},
                                                   {"GROUP_WORLD_SIZE", text(static_cast<int>(hosts.size()))},
                                                   {"MASTER_ADDR", job.address},
                                                   {"MASTER_PORT", text(job.port)},
                                                   {"TORCHELASTIC_RUN_ID", job.run_id},
                                                   {"TORCHELASTIC_RESTART_COUNT", text(job.restarts)},
                                                   {"TORCHELASTIC_MAX_RESTARTS", text(options.max_restarts)},
                                                   {"TORCHELASTIC_USE_AGENT_STORE", "False"},
                                                   {"TORCHELASTIC_ERROR_FILE", job.error_file(rank)},
                                                   {"TESSERA_LAUNCHER", "tessera"}};
  for (const auto& [name, value] : ours) {
    if (seeded_fault(SeededFault::kInheritedRankWins) && variables.contains(name)) continue;
    variables.insert_or_assign(name, value);
  }
  variables.erase("TESSERA_WORKER");
  if (is_worker) variables.insert_or_assign("TESSERA_WORKER", text(rank));
  if (options.switches.strict) variables.insert_or_assign("TESSERA_STRICT", "1");
  if (options.switches.plan) variables.insert_or_assign("TESSERA_PLAN", "table");
  // LOCAL_WORLD_SIZE is enough if all hosts have equally many ranks. A worker has its own world.
  if (hosts.size() > 1 || is_worker) variables.erase("TESSERA_HOSTS");
  if (std::ranges::any_of(hosts, [&](int ranks) { return ranks != hosts.front(); })) {
    variables.insert_or_assign("TESSERA_HOSTS", fmt::format("{}", fmt::join(hosts, ",")));
  }
  std::vector<std::string> result;
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

std::vector<std::string> without_rank(std::vector<std::string> environment) {
  static constexpr std::string_view kBegins[] = {"RANK=",
                                                 "WORLD_SIZE=",
                                                 "LOCAL_RANK=",
                                                 "LOCAL_WORLD_SIZE=",
                                                 "GROUP_",
                                                 "ROLE_",
                                                 "MASTER_",
                                                 "TORCHELASTIC_",
                                                 "SLURM_",
                                                 "OMPI_",
                                                 "PMIX_",
                                                 "PMI_",
                                                 "MPI_LOCALRANKID=",
                                                 "MPI_LOCALNRANKS=",
                                                 "MV2_",
                                                 "TESSERA_LAUNCHER=",
                                                 "TESSERA_HOSTS=",
                                                 "TESSERA_WORKER="};
  std::erase_if(environment, [](const std::string& entry) {
    return std::ranges::any_of(kBegins, [&](std::string_view begin) { return entry.starts_with(begin); });
  });
  return environment;
}

std::vector<std::string> current_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; entry && *entry; ++entry) result.emplace_back(*entry);
  return result;
}

}  // namespace tessera
