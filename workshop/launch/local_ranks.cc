#include "workshop/launch/local_ranks.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "runtime/base/status.h"
#include "workshop/launch/exit_report.h"

namespace tessera {
namespace {

constexpr int kCheckEveryMs = 50;  // time between checks of groups without a leader, whose end no descriptor shows

}  // namespace

LocalRanks::LocalRanks(const LaunchOptions& options, const JobSettings& job, Range range, Guard& guard,
                       const sigset_t& mask, RankListener& listener)
    : options_(options), job_(job), range_(range), guard_(guard), mask_(mask), listener_(listener) {}

LocalRanks::~LocalRanks() {
  for (Rank& rank : ranks_) {
    if (!rank.group_empty) rank.process.send(SIGKILL);
    if (!rank.ended) ::waitpid(rank.process.pid, nullptr, 0);
    if (!rank.group_empty) rank.process.is_group_empty();  // this reaps other processes that became our children
  }
}

absl::Status LocalRanks::start() {
  const auto inherited = current_environment();
  ranks_.reserve(static_cast<std::size_t>(range_.count));
  for (int number = range_.first; number < range_.first + range_.count; ++number) {
    TESSERA_ASSIGN_OR_RETURN(RankProcess process,
                             start_rank(options_.command, rank_environment(options_, job_, number, inherited), mask_));
    guard_.watch(process.pid);
    listener_.on_started(number, process.pid);
    ranks_.push_back({number, std::move(process)});
  }
  return absl::OkStatus();
}

HostRanks::Phase LocalRanks::phase() const {
  if (ranks_.empty()) return Phase::kConnected;
  const bool done = std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.ended && rank.group_empty; });
  return done ? Phase::kDone : Phase::kRunning;
}

void LocalRanks::add_watched(std::vector<pollfd>& watched) const {
  for (const Rank& rank : ranks_)
    for (const OwnedFd* fd : {&rank.process.out, &rank.process.err, &rank.process.exited})
      watched.push_back({fd->get(), POLLIN, 0});  // poll ignores negative descriptors
}

int LocalRanks::timeout_ms() const {
  const bool leftovers = std::ranges::any_of(ranks_, [](const Rank& rank) { return rank.ended && !rank.group_empty; });
  return leftovers ? kCheckEveryMs : -1;
}

void LocalRanks::react(std::span<const pollfd> ready) {
  for (std::size_t i = 0; i < ranks_.size() && 3 * i + 2 < ready.size(); ++i) {
    if (ready[3 * i].revents) forward_output(ranks_[i], /*errors=*/false);
    if (ready[3 * i + 1].revents) forward_output(ranks_[i], /*errors=*/true);
  }
  for (Rank& rank : ranks_) check_end(rank);
}

void LocalRanks::forward_output(Rank& rank, bool errors) {
  read_some(errors ? rank.process.err : rank.process.out, [&](std::string_view bytes) {
    errors ? listener_.on_errors(rank.number, bytes) : listener_.on_output(rank.number, bytes);
  });
}

void LocalRanks::check_end(Rank& rank) {
  if (!rank.ended) {
    const auto exit = rank.process.reap();
    if (!exit) return;
    rank.ended = true;
    rank.process.exited.reset();
    RankRecord record;
    record.rank = rank.number;
    record.pid = rank.process.pid;
    record.exit = *exit;
    if (exit->signal() == SIGKILL) record.exit.memory_limit_bytes = memory_limit_bytes();
    read_error_file(job_.error_file(rank.number), record);
    listener_.on_exit(std::move(record));
  }
  if (!rank.group_empty) end_leftovers(rank);
}

/// Ends the processes that a rank left in its group when it ended, since nobody will wait for them.
void LocalRanks::end_leftovers(Rank& rank) {
  rank.group_empty = rank.process.is_group_empty();
  if (!rank.group_empty) rank.process.send(SIGKILL);
  if (!rank.group_empty) rank.group_empty = rank.process.is_group_empty();
  if (!rank.group_empty) return;
  guard_.forget(rank.process.pid);
  // The rank's pipes hold its last output. A daemon that left the group may keep them open, but nobody waits for it.
  for (int round = 0; round < 16; ++round)
    for (const bool errors : {false, true}) forward_output(rank, errors);
  rank.process.out.reset();
  rank.process.err.reset();
  listener_.on_gone(rank.number);
}

void LocalRanks::send(int number, int signal) {
  const Rank& rank = rank_of(number);
  if (!rank.group_empty) rank.process.send(signal);
}

bool LocalRanks::is_stopped(int number) const {
  return ranks_[static_cast<std::size_t>(number - range_.first)].process.is_stopped();
}

}  // namespace tessera
