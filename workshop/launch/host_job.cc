#include "workshop/launch/host_job.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <numeric>
#include <optional>
#include <system_error>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "workshop/launch/hosts/frames.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "ATEN_CPU_CAPABILITY",
                                                    "LANG"};
constexpr std::array<std::string_view, 16> kPrefixes = {
    "PYTHON", "OMP_",     "GOMP_", "KMP_",  "MKL_",  "OPENBLAS_", "DNNL_", "ONEDNN_",
    "TORCH_", "PYTORCH_", "CUDA_", "NCCL_", "GLOO_", "TESSERA_",  "HF_",   "LC_"};

/// Returns the working directory under the name that the user's shell has for it. This path may contain links that
/// exist on other hosts too, where the folder behind the links may have another path.
std::string working_directory() {
  std::error_code ignored;
  const char* const named = ::getenv("PWD");
  if (named && *named == '/' && std::filesystem::equivalent(named, ".", ignored)) return named;
  return std::filesystem::current_path(ignored).string();
}

using SystemTime = std::chrono::system_clock::time_point;

std::int64_t age_ns(SystemTime when) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now() - when).count();
}

SystemTime time_of(std::int64_t age_ns) {
  return std::chrono::system_clock::now() -
         std::chrono::duration_cast<std::chrono::system_clock::duration>(std::chrono::nanoseconds(age_ns));
}

}  // namespace

const std::string_view kAgentGreeting = "tessera-launch-agent ";

std::string_view own_version() { return TESSERA_VERSION; }

absl::StatusOr<std::vector<std::string>> travelling_environment(const std::vector<std::string>& environment,
                                                                const std::vector<std::string>& named) {
  const auto name_of = [](const std::string& entry) { return std::string_view(entry).substr(0, entry.find('=')); };
  for (const std::string& name : named)
    if (std::ranges::none_of(environment, [&](const std::string& entry) { return name_of(entry) == name; }))
      return make_error(
          ExitCode::kUsage,
          fmt::format("launch: --env {}: there is no such variable here. [T0841] hint: give its name alone, and "
                      "its value as in: {}=value tessera launch ...",
                      quoted_text(name),
                      name.empty() || name.find('=') != std::string::npos ? "NAME" : clipped(name, 80)));
  std::vector<std::string> found;
  for (const std::string& entry : environment) {
    const std::string_view name = name_of(entry);
    const bool travels =
        std::ranges::find(kNames, name) != kNames.end() || std::ranges::find(named, name) != named.end() ||
        std::ranges::any_of(kPrefixes, [&](std::string_view prefix) { return name.starts_with(prefix); });
    if (travels) found.push_back(entry);
  }
  return found;
}

absl::StatusOr<HostJob> make_host_job(const LaunchOptions& options, const JobSettings& job, int first, int ranks) {
  HostJob result;
  result.options = options;
  result.options.pretended_hosts = ranks_of_hosts(options);
  result.options.hosts.clear();
  result.job = job;
  result.first_rank = first;
  result.ranks = ranks;
  result.directory = working_directory();
  TESSERA_ASSIGN_OR_RETURN(result.environment,
                           travelling_environment(current_environment(), options.over_ssh.environment));
  result.environment.push_back("PWD=" + result.directory);
  return result;
}

std::string encode(const HostJob& job) {
  FieldWriter fields;
  const LaunchOptions& options = job.options;
  fields.texts(options.command).number(options.ranks).number(options.max_restarts);
  fields.number(static_cast<std::int64_t>(options.pretended_hosts.size()));
  for (const int ranks : options.pretended_hosts) fields.number(ranks);
  fields.number(options.switches.strict)
      .number(options.switches.plan)
      .number(static_cast<std::int64_t>(options.times.silence_s * 1000));
  fields.text(job.job.address).number(job.job.port).number(job.job.restarts).text(job.job.run_id);
  fields.number(job.first_rank).number(job.ranks).text(job.directory).texts(job.environment);
  return fields.take();
}

std::optional<HostJob> decode_job(std::string_view body) {
  FieldReader fields(body);
  HostJob job;
  const auto number = [&] { return static_cast<int>(fields.number()); };
  job.options.command = fields.texts();
  job.options.ranks = number();
  job.options.max_restarts = number();
  for (std::int64_t hosts = fields.number(); hosts > 0 && fields.is_ok(); --hosts)
    job.options.pretended_hosts.push_back(number());
  job.options.switches.strict = number() != 0;
  job.options.switches.plan = number() != 0;
  job.options.times.silence_s = static_cast<double>(fields.number()) / 1000;
  job.job.address = fields.text();
  job.job.port = number();
  job.job.restarts = number();
  job.job.run_id = fields.text();
  job.first_rank = number();
  job.ranks = number();
  job.directory = fields.text();
  job.environment = fields.texts();
  const std::vector<int>& hosts = job.options.pretended_hosts;
  const bool are_hosts = std::ranges::all_of(hosts, [](int ranks) { return ranks > 0; }) &&
                         std::accumulate(hosts.begin(), hosts.end(), std::int64_t{0}) == job.options.ranks;
  const bool makes_sense = are_hosts && job.ranks > 0 && !job.options.command.empty();
  return fields.is_ok() && makes_sense ? std::optional(std::move(job)) : std::nullopt;
}

std::string encode_exit(const RankRecord& record) {
  FieldWriter fields;
  fields.number(record.pid).number(record.exit.wait_status).number(age_ns(record.exit.when));
  fields.number(record.exit.peak_resident_bytes).number(record.exit.memory_limit_bytes.value_or(0));
  fields.text(record.message).number(record.told_by_peer);
  fields.number(record.message_time.has_value()).number(record.message_time ? age_ns(*record.message_time) : 0);
  fields.number(record.code_of_tessera.has_value()).number(record.code_of_tessera.value_or(0));
  return fields.take();
}

std::optional<RankRecord> decode_exit(int rank, std::string_view body) {
  FieldReader fields(body);
  RankRecord record;
  record.rank = rank;
  record.pid = static_cast<pid_t>(fields.number());
  record.exit.wait_status = static_cast<int>(fields.number());
  record.exit.when = time_of(fields.number());
  record.exit.peak_resident_bytes = fields.number();
  if (const std::int64_t limit = fields.number(); limit > 0) record.exit.memory_limit_bytes = limit;
  record.message = fields.text();
  record.told_by_peer = fields.number() != 0;
  const bool has_time = fields.number() != 0;
  const SystemTime time = time_of(fields.number());
  if (has_time) record.message_time = time;
  const bool has_code = fields.number() != 0;
  const auto code = static_cast<int>(fields.number());
  if (has_code) record.code_of_tessera = code;
  return fields.is_ok() ? std::optional(std::move(record)) : std::nullopt;
}

}  // namespace tessera
