#pragma once

#include <absl/status/status.h>
#include <poll.h>
#include <sys/types.h>

#include <span>
#include <string_view>
#include <vector>

namespace tessera {

struct RankRecord;

/// The object that gets the events of a host's ranks. `rank` is the number in the whole job.
class RankListener {
 public:
  virtual ~RankListener() = default;
  virtual void on_started(int rank, pid_t pid) = 0;
  virtual void on_output(int rank, std::string_view bytes) = 0;
  virtual void on_errors(int rank, std::string_view bytes) = 0;
  /// HostRanks calls this function when the leader of the rank's process group has ended. `record` has everything that
  /// the host has found out about the rank.
  virtual void on_exit(RankRecord record) = 0;
  /// HostRanks calls this function after on_exit, when no process of the rank's group is left and all of its output was
  /// reported.
  virtual void on_gone(int rank) = 0;
};

/// The ranks that one host starts (LocalRanks on this machine, RemoteRanks on another one). A Supervisor or an agent
/// controls them. One thread makes all calls; no call waits.
class HostRanks {
 public:
  /// | phase       | state of the host                           |
  /// |-------------|---------------------------------------------|
  /// | kConnecting | the host has not answered                   |
  /// | kConnected  | the host waits for `start`                  |
  /// | kStarting   | not all ranks are known to have started     |
  /// | kRunning    | all ranks have started                      |
  /// | kDone       | no process of any rank is left              |
  enum class Phase { kConnecting, kConnected, kStarting, kRunning, kDone };

  /// Kills and reaps the processes that still run.
  virtual ~HostRanks() = default;

  /// Begins to reach the host. Errors are those of this machine.
  virtual absl::Status connect() = 0;
  /// Begins to start the ranks. REQUIRES: kConnected.
  virtual absl::Status start() = 0;
  virtual Phase phase() const = 0;
  /// Returns the reason why the host cannot be reached, or could not start its ranks. Once all ranks run, the loss of
  /// the host is no error here. The host's ranks then count as ended.
  virtual absl::Status failure() const = 0;

  /// Adds the descriptors to wait for.
  virtual void add_watched(std::vector<pollfd>& watched) const = 0;
  /// Returns the longest time to wait for the descriptors; -1: without end.
  virtual int timeout_ms() const = 0;
  /// Does everything that is due, and tells the listener. `ready` has the descriptors that the last add_watched added,
  /// after poll.
  virtual void react(std::span<const pollfd> ready) = 0;

  /// Sends `signal` to the rank's process group.
  virtual void send(int rank, int signal) = 0;
  /// Returns whether the rank's leader is stopped, as far as the host has reported it.
  virtual bool is_stopped(int rank) const = 0;
};

}  // namespace tessera
