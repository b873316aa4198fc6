#pragma once

// See docs/glossary.md: last words, slot.

#include <string>
#include <vector>

#include "workshop/launch/hosts/host_list.h"

namespace tessera {

inline constexpr int kMostLaunchedServers = 64, kMostServerStarts = 16;

/// How many workers that come and go a launcher has ("sync": {"elastic": true}).
struct WorkerRange {
  int least = 0;  ///< the fewest with which the job goes on
  int most = 0;   ///< number that is started; 0: there are no such workers, but ranks of one job
};

/// How the ranks of other hosts are started.
struct SshOptions {
  std::vector<std::string> command = {"ssh"};  ///< program that runs a command on a host, and its own options
  std::string address = {};                    ///< address by which all hosts reach this one; empty: it is found
  std::vector<std::string> environment = {};   ///< names of variables that go to the other hosts too (host_job.h)
};

/// How long the launcher and its agents wait, in seconds.
struct LaunchTimes {
  double connect_s = 60;  ///< time for a host to answer over ssh, and for each of its reports while its ranks start
  double silence_s = 60;  ///< an agent that hears nothing of the launcher for this time ends its ranks
  double grace_s = 10;    ///< time after the first failure in which other ranks may report and end by themselves
  double term_s = 5;      ///< time between SIGTERM and SIGKILL
};

/// What ranks are told by variables of the environment.
struct RankSwitches {
  /// TESSERA_STRICT=1 for the ranks: private copies, as on hosts of their own, and checked values.
  bool strict = false;
  /// TESSERA_PLAN=table for the ranks: an Engine prints its whole memory plan, and not one line of it.
  bool plan = false;
};

/// `tessera launch -n 4 -- ./train strategy.json`: N ranks of one program on this machine, or on several over ssh.
struct LaunchOptions {
  std::vector<std::string> command;  ///< program (looked up in PATH) and its arguments
  int ranks = 1;                     ///< all ranks of the job
  /// Parameter servers that are started beside the ranks, on this machine (`tessera serve`). A rank that fails then
  /// does not end the other ranks.
  int servers = 0;
  /// Folder in which servers keep their shards; empty: shards are not kept. A server that is killed, or fails in a way
  /// that may not come again, is then started again and goes on, at most kMostServerStarts times.
  std::string servers_state;
  std::string servers_offload;  ///< folder for scratch files in which servers' shards lie; empty: in memory
  int servers_lose = -1;  ///< the most pushes to each shard that the end of a server may lose; -1: the server's default
  /// Workers that come and go, in the place of ranks: `ranks` is their number, and each is a job of one rank.
  WorkerRange workers = {};
  std::string join;         ///< servers of a job that runs, HOST:PORT,HOST:PORT, which the workers join; empty: none
  std::string secret_file;  ///< file with the secret of servers and workers (job_secret.h); empty: none
  /// Ranks on each of the pretended hosts, for tests; they add up to `ranks`. Empty means one host.
  std::vector<int> pretended_hosts = {};
  /// The hosts of a job over ssh, this machine first; their slots add up to `ranks`. Empty means this machine alone.
  std::vector<HostSlots> hosts;
  SshOptions over_ssh = {};
  /// path of the `tessera` command, on the other hosts for their agents and on this one for `servers`; empty: that of
  /// this program
  std::string tessera;
  LaunchTimes times = {};
  int port = 0;          ///< rendezvous port; 0: a port that is free on this machine
  int max_restarts = 0;  ///< how often all ranks are started again after a failure that may not come again
  RankSwitches switches = {};
  bool prefix = true;  ///< "[rank 2] " before every line
  int stdout_fd = 1;   ///< where the ranks' output goes, line by line
  int stderr_fd = 2;   ///< where the ranks' errors go, and the launcher's own messages
};

/// Starts the ranks with torchrun's variables (rank_environment.h), forwards their output, and waits for all of them.
///
/// Returns 0 if every rank returned 0, else the exit code of the *first cause*: the earliest failure that is neither "a
/// peer was lost" (75) nor one that a peer told of, or the earliest at all (first_cause); 128 + n for signal n. That
/// rank, its code and its last words are printed last. Errors: 64 for options that make no sense, 66 and 77 for a
/// program that is missing or not executable, 69 for a port in use and for a host that cannot be reached, 71 where the
/// system refuses more processes, 74 where all went well except that a full device did not take everything that ranks
/// printed, 78 for another version of Tessera on a host.
///
/// | event                               | what happens                                                              |
/// |-------------------------------------|---------------------------------------------------------------------------|
/// | a rank fails                        | the others have `grace_s`, then SIGTERM, after `term_s` SIGKILL; at once  |
/// |                                     | where all that still run are stopped, since those report nothing          |
/// | a rank returns 0                    | nothing; what it left in its process group is ended                       |
/// | SIGINT, SIGTERM, SIGHUP, SIGQUIT or | forwarded to all ranks and waited for. A second one is forwarded too, and |
/// | SIGUSR1                             | `grace_s` starts. The third kills                                         |
/// | the launcher dies, even by SIGKILL  | the ranks and all of their process groups are killed (guard.h, agent.h)   |
/// | the connection to a host ends       | its ranks are killed there, and count as failed (75) with that as cause   |
///
/// All ranks begin anew after a failure, at most `max_restarts` times, with TORCHELASTIC_RESTART_COUNT one higher and,
/// unless `port` names one, on another port. The program goes on from its last checkpoint (`tessera train --resume
/// auto`). A failure that would come again ends the job at once: 64, 66, 77 and 78, which are wrong options, a missing
/// file, a missing permission and a wrong strategy. So does a failure after a signal to the launcher.
///
/// With `servers`, TESSERA_SERVERS and TESSERA_SERVERS_SECRET, a random text, are set for all processes of the job. A
/// rank that fails is named, and the others go on; a server that ends before the ranks have is a failure as above,
/// unless it starts again (`servers_state`). Once no rank is left, servers get SIGTERM. The result is 0 if some rank
/// returned 0 and no server failed.
///
/// With `workers`, each rank is a job of its own, which the environment tells (rank_environment.h): `workers.most` are
/// started. One that fails is named and started again, as long as `max_restarts` lasts and the failure may not come
/// again; the others go on. The job fails once fewer than `workers.least` are left. Once some worker has returned 0,
/// all steps are made, so none is started again but the one that was told to write the results (beside own servers
/// only). The job fails where that one has failed before they were written, and no other has written them. Servers then
/// get SIGUSR1, and end when workers of other launchers, too, have gone. Servers listen at `address`, else at the
/// loopback address, and a line tells what `join` workers elsewhere need. The secret is that of `secret_file`, else
/// that of the environment, else a random one.
///
/// A stopped rank (SIGSTOP) cannot act on SIGTERM and is continued first; SIGKILL ends it in any case.
///
/// Each rank is a process group of its own and reads /dev/null. `launch` blocks the signals of the table in the calling
/// thread while it runs, ignores SIGPIPE, takes SIGCHLD's default and is a child subreaper; it restores all of that.
/// Call it from a process without other threads that could take these signals. It waits for its own children only.
///
/// On each other host of `hosts`, ssh starts an agent (agent.h), which starts the ranks there with the same program,
/// the same working directory and the environment that host_job.h lists. No rank starts before all hosts have answered.
int launch(const LaunchOptions& options);

/// Returns the path of the `tessera` command: LaunchOptions::tessera, or that of this program.
std::string tessera_of(const LaunchOptions& options);
/// Returns the number of ranks on each host, as the ranks are told.
std::vector<int> ranks_of_hosts(const LaunchOptions& options);

}  // namespace tessera
