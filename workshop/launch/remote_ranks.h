#pragma once

#include <signal.h>

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "tessera/exit_code.h"
#include "workshop/launch/guard.h"
#include "workshop/launch/host_job.h"
#include "workshop/launch/host_ranks.h"
#include "workshop/launch/hosts/frames.h"
#include "workshop/launch/hosts/heartbeat.h"
#include "workshop/launch/line_forwarder.h"
#include "workshop/launch/rank_process.h"

namespace tessera {

/// The ranks of another host. ssh runs an agent there (agent.h), which starts the ranks and reports about them.
///
/// Only the path of `tessera` goes through the shell of the other host. Everything else, also the program's arguments,
/// goes through ssh's standard input, which no shell reads.
///
/// The reasons why a host could not start its ranks (`failure`):
///
/// | what happened                                   | code |
/// |-------------------------------------------------|------|
/// | ssh ended with 255: no connection, no key       | 69   |
/// | no answer within connect_s                      | 69   |
/// | an answer, but no rank's report for that long   | 69   |
/// | `tessera` does not exist at its path            | 66   |
/// | that `tessera` has another version              | 78   |
/// | the agent sent an error: no such program, ...   | same |
///
/// A host whose ranks run and whose connection ends is lost: its ranks that have not ended count as failed with code
/// 75, and their records say why. A host also counts as lost if it does not report the end of its ranks within 10 s
/// after SIGKILL.
class RemoteRanks : public HostRanks {
 public:
  struct Host {
    std::string name;
    HostJob job;
  };

  /// `mask` is ssh's signal mask. The references live as long as the object.
  RemoteRanks(Host host, const LaunchOptions& options, Guard& guard, Heartbeat& heartbeat, const sigset_t& mask,
              RankListener& listener);
  ~RemoteRanks() override;

  absl::Status connect() override;
  absl::Status start() override;
  Phase phase() const override { return phase_; }
  absl::Status failure() const override { return failure_; }
  void add_watched(std::vector<pollfd>& watched) const override;
  int timeout_ms() const override;
  void react(std::span<const pollfd> ready) override;
  void send(int rank, int signal) override;
  bool is_stopped(int rank) const override { return rank_of(rank).stopped; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Rank {
    pid_t pid = 0;
    bool started = false, stopped = false, ended = false, gone = false;
  };

  Rank& rank_of(int number) { return ranks_[static_cast<std::size_t>(number - host_.job.first_rank)]; }
  const Rank& rank_of(int number) const { return ranks_[static_cast<std::size_t>(number - host_.job.first_rank)]; }
  /// Returns the command line for ssh that starts the agent.
  std::vector<std::string> agent_command() const;
  void read_output();
  void read_errors();
  void take_bytes(std::string_view bytes);
  void take_greeting(std::string_view line);
  void take(const Frame& frame);
  void take_from_rank(const Frame& frame, Rank& rank);
  void write(const Frame& frame);
  void flush();
  void close_input();
  void check_deadline();
  Clock::duration time_to_answer() const;
  /// Restarts the limit of time in which the host must start its ranks or send another report.
  void give_time_to_start();
  void check_end();
  void fail(ExitCode code, const std::string& text);
  void explain_end(const RankExit& exit);
  void lose_ranks(const std::string& reason);
  std::string last_words() const;

  const Host host_;
  const LaunchOptions& options_;
  Guard& guard_;
  Heartbeat& heartbeat_;
  const sigset_t mask_;
  RankListener& listener_;

  Phase phase_ = Phase::kConnecting;
  absl::Status failure_;
  RankProcess ssh_;
  bool ended_ = false;    ///< ssh was reaped
  std::string greeting_;  ///< output that arrived before the whole greeting of the agent
  FrameReader frames_;
  std::deque<std::string> to_write_;  ///< frames that the pipe has not taken yet; the first may be partly sent
  bool beats_ = false;                ///< the heartbeat writes to the pipe, too
  LineForwarder errors_;              ///< ssh's stderr, with the agent's output
  std::vector<Rank> ranks_;
  std::optional<Clock::time_point> deadline_;  ///< time by which the host must answer, or must have ended after SIGKILL
  /// the time by which the host must report again while its ranks start
  std::optional<Clock::time_point> start_deadline_;
};

}  // namespace tessera
