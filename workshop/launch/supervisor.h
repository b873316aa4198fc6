#pragma once

#include <absl/status/status.h>
#include <signal.h>

#include <chrono>
#include <optional>
#include <vector>

#include "workshop/launch/exit_report.h"
#include "workshop/launch/guard.h"
#include "workshop/launch/launcher.h"
#include "workshop/launch/line_forwarder.h"
#include "workshop/launch/rank_environment.h"
#include "workshop/launch/rank_process.h"

namespace tessera {

/// The ranks of one job from their start to their end: one thread, one poll loop.
///
/// Its urgency says how hard the job is being ended; it only ever grows:
///
/// | urgency | entered                                             | leaves after                |
/// |---------|-----------------------------------------------------|-----------------------------|
/// | none    | at the start                                        | a failure, a second signal  |
/// | grace   | a rank failed, or the user insisted                 | grace_s, or when only ranks |
/// |         |                                                     | that are stopped are left   |
/// | term    | SIGTERM was sent to the groups still running        | term_s                      |
/// | kill    | SIGKILL was sent                                    |                             |
class Supervisor {
 public:
  /// `signals` is a signalfd for the signals to forward; `mask` the ranks' signal mask.
  Supervisor(const LaunchOptions& options, const JobSettings& job, Guard& guard, int signals, const sigset_t& mask);
  /// Kills and reaps what is still running.
  ~Supervisor();

  /// Starts all ranks. Errors: those of start_rank.
  absl::Status start_all();
  /// Returns when no process of any rank is left.
  std::vector<RankRecord> wait_all();
  /// Why output of ranks was lost, as an errno; 0 if none was.
  int output_error() const;
  /// Number of signals that were forwarded.
  int signals_taken() const { return signals_taken_; }

 private:
  using Clock = std::chrono::steady_clock;
  enum class Urgency { kNone, kGrace, kTerm, kKill };

  struct Rank {
    RankProcess process;
    LineForwarder out, err;
    RankRecord record;
    bool ended = false;        ///< the leader was reaped
    bool group_empty = false;  ///< nothing of its group is left
  };

  bool all_done() const;
  int poll_timeout_ms() const;
  void poll_once();
  void forward_output(OwnedFd& from, LineForwarder& to);
  void take_signal();
  void check_ends();
  void end_leftovers(Rank& rank);
  void raise_urgency(Urgency urgency);
  void advance_urgency();

  const LaunchOptions& options_;
  const JobSettings& job_;
  Guard& guard_;
  int signals_;
  sigset_t mask_;
  std::vector<Rank> ranks_;
  Urgency urgency_ = Urgency::kNone;
  std::optional<Clock::time_point> deadline_;  ///< end of the present urgency
  int signals_taken_ = 0;
};

}  // namespace tessera
