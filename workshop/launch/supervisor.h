#pragma once

#include <absl/status/status.h>
#include <signal.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "workshop/launch/exit_report.h"
#include "workshop/launch/guard.h"
#include "workshop/launch/host_ranks.h"
#include "workshop/launch/hosts/heartbeat.h"
#include "workshop/launch/launcher.h"
#include "workshop/launch/line_forwarder.h"
#include "workshop/launch/rank_environment.h"

namespace tessera {

/// The ranks of one job on all of its hosts, from their start to their end. One thread polls for all of them.
///
/// The urgency says how hard the Supervisor tries to end the job. It only grows:
///
/// | urgency | entered                                             | leaves after                |
/// |---------|-----------------------------------------------------|-----------------------------|
/// | none    | at the start                                        | a failure, a second signal  |
/// | grace   | a rank failed, or a second signal came              | grace_s, or when only ranks |
/// |         |                                                     | that are stopped are left   |
/// | term    | SIGTERM was sent to the groups still running        | term_s                      |
/// | kill    | SIGKILL was sent                                    |                             |
class Supervisor : private RankListener {
 public:
  /// `signals` is a signalfd for the signals to forward; `mask` is the ranks' signal mask.
  Supervisor(const LaunchOptions& options, const JobSettings& job, Guard& guard, int signals, const sigset_t& mask);
  /// Kills and reaps the processes that still run.
  ~Supervisor() override;

  /// Starts a parameter server at each address beside the ranks. Call it before `start_all`.
  void serve_at(const std::vector<std::string>& addresses);
  /// Connects to all hosts, then starts all ranks. Errors: those of start_rank, and of hosts that cannot be reached
  /// (remote_ranks.h). A signal that arrives before all hosts have answered ends the start: `interrupted_by` then names
  /// the signal, and no rank was started.
  absl::Status start_all();
  std::optional<int> interrupted_by() const { return interrupted_by_; }
  /// Waits until no process of any rank is left. Returns the records of all ranks, and then those of the servers. The
  /// numbers of servers follow those of the ranks.
  std::vector<RankRecord> wait_all();
  /// Returns the reason for which output of ranks was lost, as an errno. It is 0 if none was lost.
  int output_error() const;
  /// Returns whether a worker that was told to write the results has failed, and no worker has written them since.
  bool lacks_results() const { return lost_results_.has_value(); }
  /// Returns the number of signals that this object has received so far (take_signal).
  int signals_taken() const { return signals_taken_; }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Urgency { kNone, kGrace, kTerm, kKill };

  struct Rank {
    HostRanks* host;
    LineForwarder out, err;
    RankRecord record;
    bool ended = false;     ///< the leader has ended
    bool gone = false;      ///< nothing of the rank's process group is left
    bool is_ready = false;  ///< a server has printed its address, and from then on handles signals
    // The next fields are the state of a server that saves its shards.
    bool starts_again = false;  ///< it starts again as soon as nothing of its process group is left
    bool is_due = false;        ///< nothing of its process group is left: it starts now
    int starts = 1;
  };

  void on_started(int rank, pid_t pid) override;
  void on_output(int rank, std::string_view bytes) override;
  void on_errors(int rank, std::string_view bytes) override;
  void on_exit(RankRecord record) override;
  void on_gone(int rank) override;

  absl::Status make_hosts();
  void add_ranks(HostRanks* host, int count, const std::string& host_name);
  void add_servers();
  std::unique_ptr<HostRanks> make_server(std::size_t server, int number);
  bool may_start_again(const Rank& rank) const;
  void start_servers_again();
  bool start_anew(Rank& rank, std::unique_ptr<HostRanks> host);
  bool has_workers() const { return options_.workers.most > 0; }
  const char* word_of_rank() const;
  void follow_workers();
  void restart(Rank& worker);
  void note_results(const RankRecord& worker);
  void end_servers();
  bool is_server(int number) const { return number >= options_.ranks; }
  bool trains_beside_servers(const RankRecord& rank) const;
  /// Polls until all hosts have reached `phase`, or until a host has failed.
  absl::Status wait_for(HostRanks::Phase phase);
  bool is_connecting() const;
  Rank& rank_of(int number) { return ranks_[static_cast<std::size_t>(number)]; }
  void send(const Rank& rank, int signal);
  int poll_timeout_ms() const;
  void poll_once();
  void take_signal();
  void raise_urgency(Urgency urgency);
  void advance_urgency();

  const LaunchOptions& options_;
  std::vector<LaunchOptions> servers_;  ///< options with which each parameter server is started
  const JobSettings& job_;
  Guard& guard_;
  int signals_;
  sigset_t mask_;
  Heartbeat heartbeat_;
  std::vector<std::unique_ptr<HostRanks>> hosts_;
  std::vector<Rank> ranks_;
  Urgency urgency_ = Urgency::kNone;
  std::optional<Clock::time_point> deadline_;  ///< time at which the present urgency ends
  int signals_taken_ = 0;
  int restarts_ = 0;  ///< number of times that workers were started again
  /// the worker that was told to write the results and has failed, as long as no other worker is known to write them
  std::optional<int> lost_results_;
  bool servers_end_ = false;  ///< servers were told to end as soon as no worker is connected
  std::optional<int> interrupted_by_;
};

}  // namespace tessera
