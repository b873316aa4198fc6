#include "workshop/launch/rank_environment.h"

#include <unistd.h>

#include <map>
#include <string_view>

#include "runtime/base/seeded_fault.h"
#include "workshop/launch/launcher.h"

namespace tessera {

std::vector<std::string> rank_environment(const LaunchOptions& options, const JobSettings& job, int rank,
                                          const std::vector<std::string>& inherited) {
  const int hosts = count_hosts(options), local_world_size = options.ranks / hosts;
  const auto text = [](int number) { return std::to_string(number); };
  std::map<std::string, std::string, std::less<>> variables = {{"OMP_NUM_THREADS", text(job.omp_threads)}};
  for (const std::string& entry : inherited) {
    const auto equals = entry.find('=');
    if (equals != std::string::npos) variables.insert_or_assign(entry.substr(0, equals), entry.substr(equals + 1));
  }
  const std::map<std::string, std::string> ours = {{"RANK", text(rank)},
                                                   {"WORLD_SIZE", text(options.ranks)},
                                                   {"LOCAL_RANK", text(rank % local_world_size)},
                                                   {"LOCAL_WORLD_SIZE", text(local_world_size)},
                                                   {"GROUP_RANK", text(rank / local_world_size)},
                                                   {"GROUP_WORLD_SIZE", text(hosts)},
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
  if (options.strict) variables.insert_or_assign("TESSERA_STRICT", "1");
  if (options.plan) variables.insert_or_assign("TESSERA_PLAN", "table");
  if (hosts > 1) variables.erase("TESSERA_HOSTS");  // with several hosts, LOCAL_WORLD_SIZE says the same
  std::vector<std::string> result;
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

std::vector<std::string> current_environment() {
  std::vector<std::string> result;
  for (char** entry = environ; entry && *entry; ++entry) result.emplace_back(*entry);
  return result;
}

}  // namespace tessera
