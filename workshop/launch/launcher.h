#pragma once

// See docs/glossary.md: last words, slot.

#include <string>
#include <vector>

#include "workshop/launch/hosts/host_list.h"

namespace tessera {

inline constexpr int kMostLaunchedServers = 64, kMostServerStarts = 16;

/// The numbers of workers that come and go ("sync": {"elastic": true}).
struct WorkerRange {
  int least = 0;  ///< the smallest number with which the job continues
  int most = 0;   ///< number of workers that are started; 0: ordinary ranks of one job instead
};

/// The options by which the ranks of other hosts are started.
struct SshOptions {
  std::vector<std::string> command = {"ssh"};  ///< program that runs a command on a host, and its own options
  std::string address = {};                    ///< address by which all hosts reach this host; empty: the launcher
                                               ///< finds it
  std::vector<std::string> environment = {};   ///< names of variables that go to the other hosts too (host_job.h)
};

/// The times, in seconds, that the launcher and its agents wait.
struct LaunchTimes {
  double connect_s = 60;  ///< time for a host to answer over ssh, and for each of its reports while its ranks start
  double silence_s = 60;  ///< an agent that gets nothing from the launcher for this time ends its ranks
  double grace_s = 10;    ///< time after the first failure in which other ranks may report and end by themselves
  double term_s = 5;      ///< time between SIGTERM and SIGKILL
};

/// Settings that ranks get in variables of the environment.
struct RankSwitches {
  /// TESSERA_STRICT=1 for the ranks: each rank has private copies, as if it were alone on its host, and values are
  /// checked.
  bool strict = false;
  /// TESSERA_PLAN=table for the ranks: an Engine prints its whole memory plan instead of one line.
  bool plan = false;
};

/// `tessera launch -n 4 -- ./train strategy.json`: N ranks of one program on this machine, or on several machines over
/// ssh.
struct LaunchOptions {
  std::vector<std::string> command;  ///< program (looked up in PATH) and its arguments
  int ranks = 1;                     ///< all ranks of the job
  /// Number of parameter servers that are started on this machine, in addition to the ranks (`tessera serve`). If there
  /// are servers, a rank that fails after it has joined them does not end the other ranks.
  int servers = 0;
  /// Folder in which servers save their shards; empty: shards are not saved. A server that is killed, or fails for a
  /// reason that may not occur again, is then started again and continues, at most kMostServerStarts times.
  std::string servers_state;
  std::string servers_offload;  ///< folder for scratch files with servers' shards; empty: shards are in memory
  int servers_lose = -1;        ///< how many pushes to each shard may be lost when a server ends; -1: default
  /// Workers that come and go, instead of ranks: `ranks` is their number, and each is a job of one rank.
  WorkerRange workers = {};
  std::string join;         ///< HOST:PORT,HOST:PORT: servers of a running job that the workers join; empty: none
  std::string secret_file;  ///< file with the secret of servers and workers (job_secret.h); empty: none
  /// Number of ranks on each of the pretended hosts, for tests; the sum is `ranks`. Empty means one host.
  std::vector<int> pretended_hosts = {};
  /// The hosts of a job over ssh, with this machine first; the sum of their slots is `ranks`. Empty means only this
  /// machine.
  std::vector<HostSlots> hosts;
  SshOptions over_ssh = {};
  /// path of the `tessera` command, for the agents on other hosts and for `servers` on this host; empty: path of this
  /// program
  std::string tessera;
  LaunchTimes times = {};
  int port = 0;          ///< rendezvous port; 0: a port that is free on this machine
  int max_restarts = 0;  ///< how often all ranks may be started again, after failures that may not occur again
  RankSwitches switches = {};
  bool prefix = true;  ///< "[rank 2] " before every line
  int stdout_fd = 1;   ///< file descriptor for the ranks' output, line by line
  int stderr_fd = 2;   ///< file descriptor for the ranks' errors, and the launcher's messages
};

/// Starts the ranks with torchrun's variables (rank_environment.h), forwards their output, and waits for all of them.
///
/// Returns 0 if every rank returned 0, else the exit code of the *first cause* (first_cause), or 128 + n for signal n.
/// The first cause is the earliest failure that is neither "a peer was lost" (75) nor known to a rank only from a peer.
/// If there is none, it is the earliest failure of all. That rank, its code and its last words are printed last.
/// Errors: 64 if options make no sense, 66 if a program is missing, 77 if it is not executable, 69 if a port is in use
/// or a host cannot be reached, 71 if the system refuses more processes, 74 if all went well except that a full device
/// did not take everything that ranks printed, 78 if a host has another version of Tessera.
///
/// | event                               | what happens                                                              |
/// |-------------------------------------|---------------------------------------------------------------------------|
/// | a rank fails                        | after `grace_s` SIGTERM for the others, after `term_s` SIGKILL; at once   |
/// |                                     | if all running ranks are stopped, since those report nothing              |
/// | a rank returns 0                    | nothing; processes left in its process group are ended                    |
/// | SIGINT, SIGTERM, SIGHUP, SIGQUIT or | forwarded to all ranks and waited for. A second one is forwarded too, and |
/// | SIGUSR1                             | `grace_s` starts. The third kills the ranks                               |
/// | the launcher dies, even by SIGKILL  | the ranks and all of their process groups are killed (guard.h, agent.h)   |
/// | the connection to a host ends       | its ranks are killed there, and count as failed (75) for this cause       |
///
/// All ranks are started again after a failure, at most `max_restarts` times. TORCHELASTIC_RESTART_COUNT is then one
/// higher, and the port is another one unless `port` names it. The program continues from its last checkpoint (`tessera
/// train --resume auto`). A failure that would occur again ends the job at once. Its code is 64, 66, 77 or 78: a wrong
/// option, a missing file, a missing permission or a wrong strategy. A failure after a signal to the launcher also ends
/// the job at once.
///
/// If `servers` are set, all processes of the job get TESSERA_SERVERS and TESSERA_SERVERS_SECRET, a random text. If a
/// rank fails after it has joined the servers, a message names it, and the others continue. A server that ends before
/// the ranks do counts as a failure as above, unless it starts again (`servers_state`). Servers get SIGTERM after the
/// last rank has ended. The result is 0 if some rank returned 0 and no server failed.
///
/// If `workers` are set, each of them is a job of one rank, as its environment says (rank_environment.h). The launcher
/// starts `workers.most` workers. If a worker fails, a message names it, and the other workers continue. The worker is
/// started again, unless its failure would occur again, or `max_restarts` workers were started again already. The job
/// fails once fewer than `workers.least` workers are left.
///
/// When a worker has returned 0, all steps are made, so no worker is started again. The exception is the worker that
/// was told to write the results and has failed. It is started again if this launcher has started the servers. The job
/// fails if that worker failed before the results were written, and no other worker has written them. When no worker is
/// left here, the servers get SIGUSR1. They end when the workers of other launchers have also ended.
///
/// Servers listen at `address`, or else at the loopback address. The launcher prints the `join` that workers on other
/// machines need. The secret is that of `secret_file`, or else that of the environment, or else a random one.
///
/// A stopped rank (SIGSTOP) cannot act on SIGTERM, so SIGCONT is sent right after SIGTERM. SIGKILL ends a stopped rank
/// in any case.
///
/// Each rank has its own process group and reads /dev/null. While it runs, `launch` blocks the signals of the table in
/// the calling thread, ignores SIGPIPE, sets SIGCHLD to its default and is a child subreaper. `launch` restores all of
/// this at its end. Call it from a process without other threads that could take these signals. `launch` waits only for
/// its own children.
///
/// ssh starts an agent (agent.h) on each other host of `hosts`. The agent starts the ranks there with the same program,
/// the same working directory and the environment that host_job.h lists. No rank starts before all hosts have answered.
int launch(const LaunchOptions& options);

/// Returns the path of the `tessera` command: LaunchOptions::tessera, or else the path of this program.
std::string tessera_of(const LaunchOptions& options);
/// Returns the number of ranks on each host, as in the environment of the ranks.
std::vector<int> ranks_of_hosts(const LaunchOptions& options);

}  // namespace tessera
