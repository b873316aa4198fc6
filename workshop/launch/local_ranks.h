#pragma once

#include <signal.h>

#include <vector>

#include "workshop/launch/guard.h"
#include "workshop/launch/host_ranks.h"
#include "workshop/launch/launcher.h"
#include "workshop/launch/rank_environment.h"
#include "workshop/launch/rank_process.h"

namespace tessera {

/// Ranks of this machine, which are child processes of this process.
class LocalRanks : public HostRanks {
 public:
  /// The ranks of the job that start here.
  struct Range {
    int first = 0;
    int count = 0;
  };

  /// `mask` is the ranks' signal mask. The references live as long as the object.
  LocalRanks(const LaunchOptions& options, const JobSettings& job, Range range, Guard& guard, const sigset_t& mask,
             RankListener& listener);
  ~LocalRanks() override;

  absl::Status connect() override { return absl::OkStatus(); }
  /// Starts the ranks. Errors: those of start_rank.
  absl::Status start() override;
  Phase phase() const override;
  absl::Status failure() const override { return absl::OkStatus(); }
  void add_watched(std::vector<pollfd>& watched) const override;
  int timeout_ms() const override;
  void react(std::span<const pollfd> ready) override;
  void send(int rank, int signal) override;
  bool is_stopped(int rank) const override;

 private:
  struct Rank {
    int number = 0;
    RankProcess process;
    bool ended = false;        ///< the leader was reaped
    bool group_empty = false;  ///< nothing of the rank's process group is left
  };

  Rank& rank_of(int number) { return ranks_[static_cast<std::size_t>(number - range_.first)]; }
  void forward_output(Rank& rank, bool errors);
  void check_end(Rank& rank);
  void end_leftovers(Rank& rank);

  const LaunchOptions& options_;
  const JobSettings& job_;
  const Range range_;
  Guard& guard_;
  const sigset_t mask_;
  RankListener& listener_;
  std::vector<Rank> ranks_;
};

}  // namespace tessera
