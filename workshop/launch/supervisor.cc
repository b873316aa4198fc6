#include "workshop/launch/supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <span>
#include <string>
#include <utility>

#include "runtime/base/status.h"
#include "workshop/launch/local_ranks.h"
#include "workshop/launch/remote_ranks.h"

namespace tessera {

// This file starts all ranks and waits for them, in one loop.
//
// `poll_once` waits for signals and for the hosts' reports, and calls the `on_...` functions. `wait_all` then restarts
// the servers and workers that may begin anew (`start_servers_again`, `follow_workers`), and ends servers that nobody
// needs any more (`end_servers`). An event that ends the job raises the urgency (`raise_urgency`): first ranks have
// time to end by themselves, then SIGTERM is sent, then SIGKILL. `advance_urgency` raises the urgency further when the
// time of the present urgency is over.

namespace {

constexpr int kLookEveryMs = 200;  // time between checks for stopped ranks, while the others have their time to report
constexpr int kBeatsInSilence = 6;

std::chrono::steady_clock::duration seconds(double s) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(s));
}

}  // namespace

Supervisor::Supervisor(const LaunchOptions& options, const JobSettings& job, Guard& guard, int signals,
                       const sigset_t& mask)
    : options_(options),
      job_(job),
      guard_(guard),
      signals_(signals),
      mask_(mask),
      heartbeat_(
          std::chrono::duration_cast<std::chrono::milliseconds>(seconds(options.times.silence_s / kBeatsInSilence))) {}

Supervisor::~Supervisor() = default;

void Supervisor::serve_at(const std::vector<std::string>& addresses) {
  for (const std::string& address : addresses) {
    servers_.push_back(options_);
    std::vector<std::string>& command = servers_.back().command;
    command = {tessera_of(options_), "serve", "--listen", address};
    if (!options_.servers_state.empty()) command.insert(command.end(), {"--state", options_.servers_state});
    if (!options_.servers_offload.empty()) command.insert(command.end(), {"--offload", options_.servers_offload});
    if (options_.servers_lose >= 0) command.insert(command.end(), {"--lose", std::to_string(options_.servers_lose)});
  }
}

absl::Status Supervisor::start_all() {
  TESSERA_RETURN_IF_ERROR(make_hosts());
  for (const auto& host : hosts_) TESSERA_RETURN_IF_ERROR(host->connect());
  TESSERA_RETURN_IF_ERROR(wait_for(HostRanks::Phase::kConnected));
  if (interrupted_by_) return absl::OkStatus();
  for (auto host = hosts_.rbegin(); host != hosts_.rend(); ++host)  // other hosts first: their answers take longer
    TESSERA_RETURN_IF_ERROR((*host)->start());
  return wait_for(HostRanks::Phase::kRunning);
}

absl::Status Supervisor::make_hosts() {
  RankListener& listener = *this;
  const int here = options_.hosts.empty() ? options_.ranks : options_.hosts.front().slots;
  for (int i = 0; i < options_.workers.most; ++i) {  // each may be started again separately
    hosts_.push_back(std::make_unique<LocalRanks>(options_, job_, LocalRanks::Range{i, 1}, guard_, mask_, listener));
    add_ranks(hosts_.back().get(), 1, "");
  }
  if (has_workers()) {
    add_servers();
    return absl::OkStatus();
  }
  hosts_.push_back(std::make_unique<LocalRanks>(options_, job_, LocalRanks::Range{0, here}, guard_, mask_, listener));
  add_ranks(hosts_.back().get(), here, options_.hosts.size() > 1 ? options_.hosts.front().name : "");
  for (std::size_t i = 1; i < options_.hosts.size(); ++i) {
    const HostSlots& host = options_.hosts[i];
    const int first = static_cast<int>(ranks_.size());
    TESSERA_ASSIGN_OR_RETURN(HostJob job, make_host_job(options_, job_, first, host.slots));
    hosts_.push_back(std::make_unique<RemoteRanks>(RemoteRanks::Host{host.name, std::move(job)}, options_, guard_,
                                                   heartbeat_, mask_, listener));
    add_ranks(hosts_.back().get(), host.slots, host.name);
  }
  add_servers();
  return absl::OkStatus();
}

void Supervisor::add_servers() {
  for (std::size_t i = 0; i < servers_.size(); ++i) {
    const int number = static_cast<int>(ranks_.size());
    hosts_.push_back(make_server(i, number));
    const std::string prefix = options_.prefix ? fmt::format("[server {}] ", i) : "";
    Rank server{
        hosts_.back().get(), LineForwarder(options_.stderr_fd, prefix), LineForwarder(options_.stderr_fd, prefix), {}};
    server.record.rank = number;
    server.record.host = fmt::format("parameter server {}", i);
    ranks_.push_back(std::move(server));
  }
}

std::unique_ptr<HostRanks> Supervisor::make_server(std::size_t server, int number) {
  RankListener& listener = *this;
  return std::make_unique<LocalRanks>(servers_[server], job_, LocalRanks::Range{number, 1}, guard_, mask_, listener);
}

/// Returns whether a server that has ended may start again and continue from its saved shards.
bool Supervisor::may_start_again(const Rank& rank) const {
  const RankExit& exit = rank.record.exit;
  return is_server(rank.record.rank) && !options_.servers_state.empty() && urgency_ == Urgency::kNone &&
         exit.failed() && !fails_again(exit.code()) && rank.starts < kMostServerStarts;
}

void Supervisor::start_servers_again() {
  const auto workers = std::span(ranks_).first(static_cast<std::size_t>(options_.ranks));
  const bool is_needed = !std::ranges::all_of(workers, &Rank::gone);
  for (std::size_t i = 0; i < servers_.size(); ++i) {
    const int number = options_.ranks + static_cast<int>(i);
    Rank& rank = rank_of(number);
    if (!std::exchange(rank.is_due, false)) continue;
    rank.starts_again = rank.is_ready = false;
    if (urgency_ != Urgency::kNone) {
      rank.gone = true;
      if (!is_needed) rank.record.ended_by_launcher = true;  // the server was to start again, so this is no failure
      continue;
    }
    ++rank.starts;
    if (start_anew(rank, make_server(i, number))) continue;
    rank.gone = true;
    raise_urgency(Urgency::kGrace);
  }
}

/// Starts `rank` again through `host`, after it has ended. Returns whether it is running.
bool Supervisor::start_anew(Rank& rank, std::unique_ptr<HostRanks> host) {
  RankRecord before = std::exchange(rank.record, RankRecord{});
  rank.record.rank = before.rank;
  rank.record.host = before.host;
  if (const absl::Status status = host->start(); !status.ok()) {
    write_all(options_.stderr_fd, "tessera launch: " + message_of(status) + "\n");
    rank.record = std::move(before);
    return false;
  }
  rank.ended = rank.gone = false;
  const auto old = std::ranges::find_if(hosts_, [&](const auto& each) { return each.get() == rank.host; });
  rank.host = host.get();
  *old = std::move(host);
  return true;
}

void Supervisor::add_ranks(HostRanks* host, int count, const std::string& host_name) {
  for (int i = 0; i < count; ++i) {
    const int number = static_cast<int>(ranks_.size());
    const std::string prefix = options_.prefix ? fmt::format("[{} {}] ", word_of_rank(), number) : "";
    Rank rank{host, LineForwarder(options_.stdout_fd, prefix), LineForwarder(options_.stderr_fd, prefix), {}};
    rank.record.rank = number;
    rank.record.host = host_name;
    ranks_.push_back(std::move(rank));
  }
}

const char* Supervisor::word_of_rank() const { return has_workers() ? "worker" : "rank"; }

/// Handles workers that have ended. Starts some of them again, and ends the job if too few are left.
void Supervisor::follow_workers() {
  if (!has_workers() || urgency_ != Urgency::kNone || signals_taken_ > 0) return;
  const auto workers = std::span(ranks_).first(static_cast<std::size_t>(options_.ranks));
  // If a worker has ended with success, all steps have been made.
  const auto ended_well = [](const Rank& rank) { return rank.gone && !rank.record.exit.failed(); };
  const auto start_again = [this](Rank& worker) {
    if (worker.gone && restarts_ < options_.max_restarts && !fails_again(worker.record.exit.code())) restart(worker);
  };
  if (std::ranges::any_of(workers, ended_well)) {
    // The servers of another launcher may have ended by now.
    if (lost_results_ && options_.join.empty()) start_again(rank_of(*lost_results_));
    return;
  }
  for (Rank& worker : workers) start_again(worker);
  const auto there = std::ranges::count_if(workers, [](const Rank& rank) { return !rank.gone; });
  if (there < options_.workers.least) raise_urgency(Urgency::kGrace);
}

void Supervisor::restart(Rank& worker) {
  ++restarts_;
  const int number = worker.record.rank;
  write_all(options_.stderr_fd, fmt::format("tessera launch: restart {} of {}: worker {} begins anew\n", restarts_,
                                            options_.max_restarts, number));
  ::unlink(job_.error_file(number).c_str());
  ::unlink(job_.results_file(number).c_str());
  RankListener& listener = *this;
  auto host = std::make_unique<LocalRanks>(options_, job_, LocalRanks::Range{number, 1}, guard_, mask_, listener);
  if (!start_anew(worker, std::move(host))) return;
  const std::string prefix = options_.prefix ? fmt::format("[worker {}] ", number) : "";
  worker.out = LineForwarder(options_.stdout_fd, prefix);
  worker.err = LineForwarder(options_.stderr_fd, prefix);
}

/// Checks whether a worker that has ended was told to write the results. If this worker failed before the results were
/// written, `lost_results_` is its number: it is started again, or another worker is told to write them. If this worker
/// ends with success later, the results are written, or a worker of another launcher is told to write them.
void Supervisor::note_results(const RankRecord& worker) {
  std::ifstream file(job_.results_file(worker.rank));
  const bool was_told = file.is_open();
  std::string word;
  file >> word;
  if (word == "written") {
    lost_results_.reset();
  } else if (!worker.exit.failed()) {
    if (was_told || lost_results_ == worker.rank) lost_results_.reset();
  } else if (was_told) {
    lost_results_ = worker.rank;
    write_all(options_.stderr_fd,
              fmt::format("tessera launch: worker {} was told to write the results, and has failed\n", worker.rank));
  }
}

/// Ends the servers when no rank is left here. Workers of other launchers may still run if all steps are made. If a
/// server is killed before these workers have ended, it starts again, and `on_output` tells it to end.
void Supervisor::end_servers() {
  const auto workers = std::span(ranks_).first(static_cast<std::size_t>(options_.ranks));
  if (servers_.empty() || !std::ranges::all_of(workers, &Rank::gone)) return;
  const bool have_trained = std::ranges::any_of(workers, [](const Rank& rank) { return !rank.record.exit.failed(); });
  if (!has_workers() || !have_trained || signals_taken_ > 0) return raise_urgency(Urgency::kTerm);
  if (std::exchange(servers_end_, true)) return;
  for (const Rank& rank : ranks_)
    if (is_server(rank.record.rank) && rank.is_ready && !rank.gone) send(rank, SIGUSR1);
}

absl::Status Supervisor::wait_for(HostRanks::Phase phase) {
  const auto has_come = [&](const auto& host) { return host->phase() >= phase; };
  while (!interrupted_by_ && !std::ranges::all_of(hosts_, has_come)) {
    poll_once();
    advance_urgency();
    for (const auto& host : hosts_) TESSERA_RETURN_IF_ERROR(host->failure());
  }
  return absl::OkStatus();
}

bool Supervisor::is_connecting() const {
  return std::ranges::any_of(hosts_, [](const auto& host) { return host->phase() < HostRanks::Phase::kStarting; });
}

std::vector<RankRecord> Supervisor::wait_all() {
  while (!std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.gone; })) {
    poll_once();
    start_servers_again();
    follow_workers();
    end_servers();
    advance_urgency();
  }
  std::vector<RankRecord> records;
  for (Rank& rank : ranks_) {
    rank.record.last_errors = rank.err.last_lines();
    records.push_back(rank.record);
  }
  return records;
}

int Supervisor::output_error() const {
  for (const Rank& rank : ranks_)
    for (const LineForwarder* lines : {&rank.out, &rank.err})
      if (lines->error() != 0) return lines->error();
  return 0;
}

int Supervisor::poll_timeout_ms() const {
  int least = -1;
  const auto wait = [&](std::int64_t ms) {
    least = static_cast<int>(least < 0 ? ms : std::min<std::int64_t>(least, ms));
  };
  for (const auto& host : hosts_)
    if (const int ms = host->timeout_ms(); ms >= 0) wait(ms);
  if (!deadline_) return least;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now()).count();
  wait(std::clamp<std::int64_t>(left, 0, urgency_ == Urgency::kGrace ? kLookEveryMs : 60'000));
  return least;
}

void Supervisor::poll_once() {
  std::vector<pollfd> watched = {{signals_, POLLIN, 0}};
  std::vector<std::size_t> ends;
  for (const auto& host : hosts_) {
    host->add_watched(watched);
    ends.push_back(watched.size());
  }
  ::poll(watched.data(), watched.size(), poll_timeout_ms());
  if (watched[0].revents) take_signal();
  std::size_t begin = 1;
  for (std::size_t i = 0; i < hosts_.size(); begin = ends[i++])
    hosts_[i]->react(std::span(watched).subspan(begin, ends[i] - begin));
}

void Supervisor::on_started(int rank, pid_t pid) { rank_of(rank).record.pid = pid; }

void Supervisor::on_output(int number, std::string_view bytes) {
  Rank& rank = rank_of(number);
  rank.out.add(bytes);
  if (is_server(number) && !std::exchange(rank.is_ready, true) && servers_end_) send(rank, SIGUSR1);
}

void Supervisor::on_errors(int rank, std::string_view bytes) { rank_of(rank).err.add(bytes); }

void Supervisor::on_exit(RankRecord record) {
  Rank& rank = rank_of(record.rank);
  record.host = rank.record.host;
  record.ended_by_launcher = rank.record.ended_by_launcher;
  record.was_stopped = rank.record.was_stopped;
  rank.record = std::move(record);
  rank.ended = true;
  if (has_workers() && !is_server(rank.record.rank)) note_results(rank.record);
  if (may_start_again(rank)) {
    rank.starts_again = true;
    write_all(options_.stderr_fd,
              fmt::format("tessera launch: {} has ended: {}; it starts again, and goes on from {}\n", rank.record.host,
                          explain(rank.record.exit, rank.record.code_of_tessera), options_.servers_state));
    return;
  }
  const bool ends_others = is_server(rank.record.rank) || (!has_workers() && !trains_beside_servers(rank.record));
  if (ends_others && (rank.record.exit.failed() || is_server(rank.record.rank))) raise_urgency(Urgency::kGrace);
  if (!ends_others && rank.record.exit.failed() && urgency_ == Urgency::kNone)
    write_all(options_.stderr_fd,
              fmt::format("tessera launch: {} {} has ended: {}; the others go on\n", word_of_rank(), rank.record.rank,
                          explain(rank.record.exit, rank.record.code_of_tessera)));
}

/// Returns whether the other ranks may go on without this rank. Training cannot begin before all ranks have joined the
/// servers.
bool Supervisor::trains_beside_servers(const RankRecord& rank) const {
  if (servers_.empty()) return false;
  // Ranks on other hosts write their files there, so their files are not checked. If there are several hosts, each
  // record has the name of its host.
  return !rank.host.empty() || ::access(job_.joined_file(rank.rank).c_str(), F_OK) == 0;
}

void Supervisor::on_gone(int number) {
  Rank& rank = rank_of(number);
  rank.out.finish();
  rank.err.finish();
  (rank.starts_again ? rank.is_due : rank.gone) = true;
}

void Supervisor::send(const Rank& rank, int signal) {
  rank.host->send(rank.record.rank, signal);
  rank.host->send(rank.record.rank, SIGCONT);  // a stopped process acts on no signal except SIGCONT and SIGKILL
}

void Supervisor::take_signal() {
  signalfd_siginfo info;
  if (::read(signals_, &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return;
  const int signal = static_cast<int>(info.ssi_signo);
  ++signals_taken_;
  const char* name = ::sigabbrev_np(signal);
  if (is_connecting()) {
    interrupted_by_ = signal;
    write_all(
        options_.stderr_fd,
        fmt::format("tessera launch: SIG{} before all hosts have answered: no rank was started\n", name ? name : "?"));
    return;
  }
  write_all(options_.stderr_fd, fmt::format("tessera launch: SIG{} goes to all ranks{}\n", name ? name : "?",
                                            signals_taken_ == 1   ? "; waiting for them"
                                            : signals_taken_ == 2 ? " again; a third one kills"
                                                                  : ": killing"));
  for (const Rank& rank : ranks_)
    if (!rank.gone && !is_server(rank.record.rank)) send(rank, signal);  // servers end after the ranks
  if (signals_taken_ == 2) raise_urgency(Urgency::kGrace);
  if (signals_taken_ > 2) raise_urgency(Urgency::kKill);
}

void Supervisor::raise_urgency(Urgency urgency) {
  if (urgency <= urgency_) return;
  urgency_ = urgency;
  deadline_.reset();
  if (urgency == Urgency::kGrace) deadline_ = Clock::now() + seconds(options_.times.grace_s);
  if (urgency == Urgency::kTerm) deadline_ = Clock::now() + seconds(options_.times.term_s);
  if (urgency < Urgency::kTerm) return;
  for (Rank& rank : ranks_) {
    if (rank.ended) continue;
    rank.record.ended_by_launcher = true;
    rank.record.was_stopped = rank.record.was_stopped || rank.host->is_stopped(rank.record.rank);
    send(rank, urgency == Urgency::kTerm ? SIGTERM : SIGKILL);
  }
}

void Supervisor::advance_urgency() {
  const bool is_vain = urgency_ == Urgency::kGrace && std::ranges::all_of(ranks_, [](const Rank& rank) {
                         return rank.ended || rank.host->is_stopped(rank.record.rank);
                       });
  if (!is_vain && (!deadline_ || Clock::now() < *deadline_)) return;
  raise_urgency(urgency_ == Urgency::kGrace ? Urgency::kTerm : Urgency::kKill);
}

}  // namespace tessera
