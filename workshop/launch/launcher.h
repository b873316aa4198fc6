#pragma once

#include <string>
#include <vector>

namespace tessera {

/// `tessera launch -n 4 -- ./train strategy.json`: N ranks of one program on this machine.
struct LaunchOptions {
  std::vector<std::string> command;  ///< program (looked up in PATH) and its arguments
  int ranks = 1;
  int hosts = 1;         ///< pretended hosts, for tests: local ranks and GROUP_RANK follow; must divide `ranks`
  int port = 0;          ///< rendezvous port on 127.0.0.1; 0: a free one
  double grace_s = 10;   ///< time after the first failure in which the others may report and end by themselves
  double term_s = 5;     ///< between SIGTERM and SIGKILL
  int max_restarts = 0;  ///< how often all ranks are started again after a failure that another start may not have
  /// TESSERA_STRICT=1 for the ranks: private copies, as on hosts of their own, and checked values.
  bool strict = false;
  /// TESSERA_PLAN=table for the ranks: an Engine prints its whole memory plan, and not one line of it.
  bool plan = false;
  bool prefix = true;  ///< "[rank 2] " before every line
  int stdout_fd = 1;   ///< where the ranks' output goes, line by line
  int stderr_fd = 2;   ///< their errors, and the launcher's own messages
};

/// Starts the ranks with torchrun's variables (rank_environment.h), forwards their output, and waits for all of them.
///
/// Returns 0 if every rank returned 0, else the exit code of the *first cause*: the earliest failure that is neither "a
/// peer was lost" (75) nor one that a peer told of, or the earliest at all (first_cause); 128 + n for signal n. That
/// rank, its code and its last words are printed last. 64 for options that make no sense, 66 and 77 for a program that
/// is missing or not executable, 69 for a port in use, 71 where the system refuses more processes, 74 where all went
/// well except that a full device did not take everything that ranks printed.
///
/// | event                               | what happens                                                              |
/// |-------------------------------------|---------------------------------------------------------------------------|
/// | a rank fails                        | the others have `grace_s`, then SIGTERM, after `term_s` SIGKILL; at once  |
/// |                                     | where all that still run are stopped, since those report nothing          |
/// | a rank returns 0                    | nothing; what it left in its process group is ended                       |
/// | SIGINT, SIGTERM, SIGHUP, SIGQUIT or | forwarded to all ranks and waited for. A second one is forwarded too, and |
/// | SIGUSR1                             | `grace_s` starts. The third kills                                         |
/// | the launcher dies, even by SIGKILL  | the ranks and all of their process groups are killed (guard.h)            |
///
/// All ranks begin anew after a failure, at most `max_restarts` times, with TORCHELASTIC_RESTART_COUNT one higher and,
/// unless `port` names one, on another port; the program goes on from its last checkpoint (`tessera train --resume
/// auto`). A failure that would come again ends the job at once: 64, 66, 77 and 78, which are wrong options, a missing
/// file, a missing permission and a wrong strategy. So does a failure after a signal to the launcher.
///
/// A stopped rank (SIGSTOP) cannot act on SIGTERM and is continued first; SIGKILL ends it in any case.
///
/// Each rank is a process group of its own and reads /dev/null. `launch` blocks those signals in the calling thread
/// while it runs, ignores SIGPIPE, takes SIGCHLD's default and is a child subreaper; it restores all of that. Call it
/// from a process without other threads that could take these signals. It waits for its own children only.
int launch(const LaunchOptions& options);

}  // namespace tessera
