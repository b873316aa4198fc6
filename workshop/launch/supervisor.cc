#include "workshop/launch/supervisor.h"

#include <fmt/format.h>
#include <poll.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>

#include "runtime/base/status.h"

namespace tessera {

namespace {

constexpr int kCheckEveryMs = 50;  // while groups outlive their leaders, since no descriptor tells of their end
constexpr int kLookEveryMs = 200;  // looks for ranks that are stopped, while the others have their time to report

std::chrono::steady_clock::duration seconds(double s) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(s));
}

}  // namespace

Supervisor::Supervisor(const LaunchOptions& options, const JobSettings& job, Guard& guard, int signals,
                       const sigset_t& mask)
    : options_(options), job_(job), guard_(guard), signals_(signals), mask_(mask) {}

Supervisor::~Supervisor() {
  for (Rank& rank : ranks_) {
    if (!rank.group_empty) rank.process.send(SIGKILL);
    if (!rank.ended) ::waitpid(rank.process.pid, nullptr, 0);
    if (!rank.group_empty) rank.process.is_group_empty();  // reaps others that became our children
  }
}

absl::Status Supervisor::start_all() {
  const auto inherited = current_environment();
  ranks_.reserve(static_cast<std::size_t>(options_.ranks));
  for (int r = 0; r < options_.ranks; ++r) {
    TESSERA_ASSIGN_OR_RETURN(RankProcess process,
                             start_rank(options_.command, rank_environment(options_, job_, r, inherited), mask_));
    guard_.watch(process.pid);
    const std::string prefix = options_.prefix ? fmt::format("[rank {}] ", r) : "";
    Rank rank{
        std::move(process), LineForwarder(options_.stdout_fd, prefix), LineForwarder(options_.stderr_fd, prefix), {}};
    rank.record.rank = r;
    rank.record.pid = rank.process.pid;
    ranks_.push_back(std::move(rank));
  }
  return absl::OkStatus();
}

std::vector<RankRecord> Supervisor::wait_all() {
  while (!all_done()) {
    poll_once();
    check_ends();
    advance_urgency();
  }
  std::vector<RankRecord> records;
  for (Rank& rank : ranks_) {
    rank.record.last_errors = rank.err.last_lines();
    read_error_file(job_.error_file(rank.record.rank), rank.record);
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

bool Supervisor::all_done() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.ended && rank.group_empty; });
}

int Supervisor::poll_timeout_ms() const {
  const bool leftovers =
      std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.ended && !rank.group_empty; });
  if (leftovers) return kCheckEveryMs;
  if (!deadline_) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(*deadline_ - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, urgency_ == Urgency::kGrace ? kLookEveryMs : 60'000));
}

void Supervisor::poll_once() {
  std::vector<pollfd> watched = {{signals_, POLLIN, 0}};
  for (const Rank& rank : ranks_) {
    for (const OwnedFd* fd : {&rank.process.out, &rank.process.err, &rank.process.exited})
      watched.push_back({fd->get(), POLLIN, 0});  // poll ignores negative descriptors
  }
  if (::poll(watched.data(), watched.size(), poll_timeout_ms()) <= 0) return;
  if (watched[0].revents) take_signal();
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = ranks_[i];
    if (watched[1 + 3 * i].revents) forward_output(rank.process.out, rank.out);
    if (watched[2 + 3 * i].revents) forward_output(rank.process.err, rank.err);
  }
}

/// Reads a few buffers a call at most, so that a rank that never stops writing cannot keep the loop from the others.
void Supervisor::forward_output(OwnedFd& from, LineForwarder& to) {
  std::array<char, 64 << 10> buffer;
  for (int round = 0; round < 4 && from.is_open(); ++round) {
    const ssize_t got = ::read(from.get(), buffer.data(), buffer.size());
    if (got > 0) {
      to.add({buffer.data(), static_cast<std::size_t>(got)});
    } else if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
      return;
    } else {
      to.finish();
      from.reset();
    }
  }
}

void Supervisor::take_signal() {
  signalfd_siginfo info;
  if (::read(signals_, &info, sizeof info) != static_cast<ssize_t>(sizeof info)) return;
  const int signal = static_cast<int>(info.ssi_signo);
  ++signals_taken_;
  const char* name = ::sigabbrev_np(signal);
  write_all(options_.stderr_fd, fmt::format("tessera launch: SIG{} goes to all ranks{}\n", name ? name : "?",
                                            signals_taken_ == 1   ? "; waiting for them"
                                            : signals_taken_ == 2 ? " again; a third one kills"
                                                                  : ": killing"));
  for (const Rank& rank : ranks_) {
    if (rank.group_empty) continue;
    rank.process.send(signal);
    rank.process.send(SIGCONT);  // a stopped rank would not see it
  }
  if (signals_taken_ == 2) raise_urgency(Urgency::kGrace);
  if (signals_taken_ > 2) raise_urgency(Urgency::kKill);
}

void Supervisor::check_ends() {
  for (Rank& rank : ranks_) {
    if (!rank.ended) {
      const auto exit = rank.process.reap();
      if (!exit) continue;
      rank.ended = true;
      rank.process.exited.reset();
      rank.record.exit = *exit;
      if (exit->failed()) raise_urgency(Urgency::kGrace);
    }
    if (!rank.group_empty) end_leftovers(rank);
  }
}

/// Ends what a rank that is gone left behind in its group: nobody will wait for it.
void Supervisor::end_leftovers(Rank& rank) {
  rank.group_empty = rank.process.is_group_empty();
  if (!rank.group_empty) rank.process.send(SIGKILL);
  if (!rank.group_empty) rank.group_empty = rank.process.is_group_empty();
  if (!rank.group_empty) return;
  guard_.forget(rank.process.pid);
  for (auto [from, to] : {std::pair(&rank.process.out, &rank.out), std::pair(&rank.process.err, &rank.err)}) {
    // Its pipes hold what it wrote last. A daemon that left the group may keep them open, but nobody waits for it.
    for (int round = 0; round < 16; ++round) forward_output(*from, *to);
    to->finish();
    from->reset();
  }
}

void Supervisor::raise_urgency(Urgency urgency) {
  if (urgency <= urgency_) return;
  urgency_ = urgency;
  deadline_.reset();
  if (urgency == Urgency::kGrace) deadline_ = Clock::now() + seconds(options_.grace_s);
  if (urgency == Urgency::kTerm) deadline_ = Clock::now() + seconds(options_.term_s);
  if (urgency < Urgency::kTerm) return;
  for (Rank& rank : ranks_) {
    if (rank.ended) continue;
    rank.record.ended_by_launcher = true;
    rank.record.was_stopped = rank.record.was_stopped || rank.process.is_stopped();
    rank.process.send(urgency == Urgency::kTerm ? SIGTERM : SIGKILL);
    rank.process.send(SIGCONT);  // a stopped process gets no other signal but SIGKILL
  }
}

void Supervisor::advance_urgency() {
  const bool is_vain = urgency_ == Urgency::kGrace && std::ranges::all_of(ranks_, [](const Rank& rank) {
                         return rank.ended || rank.process.is_stopped();
                       });
  if (!is_vain && (!deadline_ || Clock::now() < *deadline_)) return;
  raise_urgency(urgency_ == Urgency::kGrace ? Urgency::kTerm : Urgency::kKill);
}

}  // namespace tessera
