#include "workshop/app/launch_line.h"

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <sstream>
#include <string_view>

#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "workshop/app/command_line.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kMostRestarts = 1000;

bool is_number(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

/// Reads the text of --pretend-hosts: a number of hosts, among which the `ranks` are divided equally, or the number of
/// ranks of each host.
absl::StatusOr<std::vector<int>> pretended_hosts(const std::string& text, int ranks) {
  std::vector<int> numbers;
  std::string_view rest = text;
  while (true) {
    int number = 0;
    const auto [stopped, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
    rest.remove_prefix(static_cast<std::size_t>(stopped - rest.data()));
    if (error != std::errc() || number < 1 || number > kMostLaunched || !(rest.empty() || rest.front() == ','))
      return make_error(ExitCode::kUsage, "launch: --pretend-hosts " + quoted_text(text) +
                                              ": want a number of hosts, or the ranks of each, from 1 to " +
                                              std::to_string(kMostLaunched) +
                                              ". [T0988] hint: write --pretend-hosts 2, or --pretend-hosts 2,3");
    numbers.push_back(number);
    if (rest.empty()) break;
    rest.remove_prefix(1);
  }
  if (numbers.size() > 1) return numbers;
  const int hosts = numbers.front();
  if (ranks % hosts != 0)
    return make_error(ExitCode::kUsage, "launch: " + std::to_string(hosts) + " pretended hosts do not divide " +
                                            std::to_string(ranks) +
                                            " ranks. [T0593] hint: give -n a multiple of --pretend-hosts, or name the "
                                            "ranks of each host, as in --pretend-hosts 2,3");
  return hosts == 1 ? std::vector<int>() : std::vector<int>(static_cast<std::size_t>(hosts), ranks / hosts);
}

/// Reads the text of --workers: the smallest and the largest number of workers, or one number for both.
absl::StatusOr<WorkerRange> worker_range(const std::string& text) {
  WorkerRange range;
  const char* const end = text.data() + text.size();
  std::from_chars_result read = std::from_chars(text.data(), end, range.least);
  range.most = range.least;
  if (read.ec == std::errc() && read.ptr != end && *read.ptr == ':')
    read = std::from_chars(read.ptr + 1, end, range.most);
  if (read.ec == std::errc() && read.ptr == end && range.least >= 1 && range.least <= range.most &&
      range.most <= kMostLaunched)
    return range;
  return make_error(ExitCode::kUsage, "launch: --workers " + quoted_text(text) +
                                          ": want the fewest and the most, from 1 to " + std::to_string(kMostLaunched) +
                                          ". [T1031] hint: write --workers 1:8");
}

/// Returns the words of the option --ssh, which are separated by blanks.
std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

}  // namespace

void LaunchLine::add_to(CLI::App& app) {
  command_ = app.add_subcommand("launch", "start ranks, here or on several hosts: tessera launch -n 4 -- program args");
  add_ranks();
  add_hosts();
  command_->prefix_command();  // the first word that is no option is the program, with or without a "--" before it
}

void LaunchLine::add_ranks() {
  command_->add_option("-n,--ranks", options.ranks, "ranks to start on this machine")
      ->transform(integer_from(1, kMostLaunched))
      ->capture_default_str();
  command_
      ->add_option("--servers", options.servers,
                   "parameter servers beside the ranks, on this machine (\"sync\": {\"owners\": \"servers\"})")
      ->transform(integer_from(0, kMostLaunchedServers))
      ->capture_default_str();
  command_->add_option("--servers-state", options.servers_state,
                       "folder in which servers keep their shards; one that is killed is started again and goes on");
  command_->add_option(
      "--servers-offload", options.servers_offload,
      "folder on a local disk for scratch files in which servers' shards lie; else they are in memory");
  command_
      ->add_option("--servers-lose", options.servers_lose,
                   "with --servers-state: the most pushes to each shard that the end of a server may lose")
      ->transform(integer_from(0, 1 << 20));
  command_->add_option("--workers", workers_,
                       "workers that come and go, each a job of one rank: 1:8 starts 8 and goes on with 1 (\"sync\": "
                       "{\"elastic\": true})");
  command_->add_option("--join", options.join,
                       "servers of a job that runs, HOST:PORT,HOST:PORT, as its launcher printed them; with --workers");
  command_->add_option("--secret", options.secret_file,
                       "file with the secret of servers and workers; the launcher with --servers makes a missing one");
  command_
      ->add_option("--pretend-hosts", pretended_,
                   "hosts that ranks are told of, for tests, or the ranks of each: 2,3; all are started here")
      ->capture_default_str();
  command_->add_option("--port", options.port, "rendezvous port; 0: a free one")
      ->transform(integer_from(0, 65535))
      ->capture_default_str();
  command_->add_option("--grace", options.times.grace_s, "seconds for the other ranks after a failure")
      ->check(number_from(0, 1e6))
      ->capture_default_str();
  command_
      ->add_option("--max-restarts", options.max_restarts,
                   "starts of all ranks again, after failures that may not come back")
      ->transform(integer_from(0, kMostRestarts))
      ->capture_default_str();
  command_->add_flag(
      "--strict", options.switches.strict,
      "ranks as if each had a host of its own: private copies of parameters, and writes to them checked");
  command_->add_flag("--plan", options.switches.plan,
                     "say the whole memory plan, a row a kind of memory, not one line of it");
  command_->add_flag("!--no-prefix", options.prefix, "do not put [rank n] before lines");
}

void LaunchLine::add_hosts() {
  command_->add_option("--hosts", hosts_, "hosts and their numbers of ranks, this machine first: a:2,b:2; over ssh");
  command_->add_option("--hostfile", hostfile_, "a file that names them, one a line: a slots=2");
  command_->add_option("--ssh", ssh_,
                       "program that runs a command on a host, with its options: \"ssh -p 2222\"; else $TESSERA_SSH, "
                       "else ssh");
  command_->add_option("--address", options.over_ssh.address,
                       "address by which all hosts reach this one; found if not given");
  command_
      ->add_option("--env", options.over_ssh.environment,
                   "name of a variable that goes to the other hosts too; may be given several times")
      ->allow_extra_args(false);
}

int LaunchLine::run() {
  if (const std::string slip = take_words(); !slip.empty()) return refuse(slip);
  if (const absl::Status status = take_hosts(); !status.ok()) {
    std::fprintf(stderr, "%s\n", message_of(status).c_str());
    return static_cast<int>(exit_code_of(status));
  }
  return launch(options);
}

std::string LaunchLine::take_words() {
  const std::vector<std::string> words = command_->remaining();
  if (is_number(hosts_))  // in version 0.1 the option took a number
    return "`tessera launch --hosts " + clipped(hosts_, 80) +
           "`: --hosts takes no number. [T0761] hint: pretended hosts, for tests, are --pretend-hosts " +
           clipped(hosts_, 80);
  if (words.empty()) return "";
  if (words[0].starts_with("-"))
    return "`tessera launch` has no option " + clipped(words[0], 80) +
           ". [T0018] hint: write tessera launch -n 4 -- program args";
  if (!options.command.empty())
    return "`tessera launch` got two programs: " + clipped(words[0], 80) + ", and " +
           clipped(options.command.front(), 80) +
           " behind the \"--\". [T0019] hint: write tessera launch -n 4 -- program args";
  options.command = words;
  return "";
}

absl::Status LaunchLine::take_workers() {
  for (const char* option : {"--ranks", "--hosts", "--hostfile", "--pretend-hosts", "--ssh", "--env"})
    if (command_->count(option) > 0)
      return make_error(ExitCode::kUsage,
                        std::string("launch: ") + option +
                            " is for ranks of one job, and workers that come and go are jobs of their own, on this "
                            "machine. [T1032] hint: leave it out; on each other host run tessera launch --join");
  TESSERA_ASSIGN_OR_RETURN(options.workers, worker_range(workers_));
  options.ranks = options.workers.most;
  return absl::OkStatus();
}

absl::Status LaunchLine::take_hosts() {
  const auto given = [&](const char* option) { return command_->count(option) > 0; };
  const auto wrong = [](const std::string& text) { return make_error(ExitCode::kUsage, "launch: " + text); };
  if (given("--workers")) return take_workers();
  if (!given("--hosts") && !given("--hostfile")) {
    for (const char* option : {"--ssh", "--address", "--env"})
      if (given(option))
        return wrong(
            std::string(option) +
            " is for ranks on several hosts, and all ranks start here. [T0836] hint: name the hosts by --hosts "
            "or --hostfile, or leave it out");
    TESSERA_ASSIGN_OR_RETURN(options.pretended_hosts, pretended_hosts(pretended_, options.ranks));
    return absl::OkStatus();
  }
  if (given("--hosts") && given("--hostfile"))
    return wrong("hosts are named by --hosts and by --hostfile. [T0837] hint: give one of them");
  if (given("--ranks"))
    return wrong(
        "-n and hosts both say how many ranks there are. [T0838] hint: leave -n out, and give each host its number, as "
        "in --hosts a:2,b:2");
  if (given("--pretend-hosts"))
    return wrong(
        "--pretend-hosts is for ranks that all start here, and hosts are reached over ssh. [T0926] hint: leave one of "
        "them out");
  auto hosts = given("--hosts") ? parse_hosts(hosts_) : read_hostfile(hostfile_);
  if (!hosts.ok()) return hosts.status();
  options.hosts = *std::move(hosts);
  const char* const usual = std::getenv("TESSERA_SSH");
  if (given("--ssh") || (usual && *usual)) options.over_ssh.command = words_of(given("--ssh") ? ssh_ : usual);
  options.ranks = std::accumulate(options.hosts.begin(), options.hosts.end(), 0,
                                  [](int sum, const HostSlots& host) { return sum + host.slots; });
  return absl::OkStatus();
}

}  // namespace tessera::app
