#pragma once

// See docs/glossary.md: last words.

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "workshop/launch/rank_process.h"

namespace tessera {

/// Everything that is known about a rank at the end of the job.
struct RankRecord {
  int rank = 0;
  pid_t pid = 0;
  std::string host;  ///< host where the rank ran; empty if this machine is the only host
  RankExit exit;
  bool ended_by_launcher = false;       ///< whether the rank still ran when its time was up
  bool was_stopped = false;             ///< whether the rank still ran because it was stopped
  std::string lost;                     ///< reason why it is not known how the rank ended; empty: it is known
  std::deque<std::string> last_errors;  ///< last lines of the rank's stderr
  std::string message;                  ///< text of the rank's error file; empty: none
  std::optional<std::chrono::system_clock::time_point> message_time;
  bool told_by_peer = false;  ///< whether the rank's error file says that it ended because another rank had failed
  /// This field is set if the rank's error file says that Tessera chose the exit code (tessera/exit_code.h). Any other
  /// exit code is chosen by the program, and may mean anything.
  std::optional<int> code_of_tessera;

  bool failed() const { return exit.failed() && !ended_by_launcher; }
  /// Returns the time at which the rank failed. If the rank has an error file, this is the time at which the file was
  /// written, since a rank may take long to end afterwards.
  std::chrono::system_clock::time_point failure_time() const;
};

/// Returns the record that explains the others, which is the earliest failure. "A peer was lost" (75), or a failure
/// that a rank knows only from a peer, counts only if there is no other failure. A rank that the launcher ended is
/// never this record. The result is null if no rank failed.
const RankRecord* first_cause(const std::vector<RankRecord>& records);

/// Returns a text such as "exit code 65 (corrupt data)" if Tessera chose the code, "exit code 65" if the program chose
/// it, or "signal 9 (SIGKILL): killed from outside, perhaps by the out-of-memory killer ...".
std::string explain(const RankExit& exit, std::optional<int> code_of_tessera);

/// Returns whether the same program would fail with `code` again, whatever happens to the machine: 64, 66, 77, 78.
bool fails_again(int code);

/// Returns the block that is printed last. It has a line for each rank (only for failed ranks, if there are many), then
/// the first cause with its last words. If the cause is "a peer was lost" and a rank had ended with success before, the
/// block says so. In this case no rank failed by itself, but that rank did less than the other ranks.
std::string failure_report(const std::vector<RankRecord>& records, const RankRecord& cause);

/// Fills in message, message_time, told_by_peer and code_of_tessera from the file in torchrun's form, `{"message":
/// {"message": "...", ...}}` or `{"message": "..."}`. A missing or broken file changes no field.
void read_error_file(const std::string& path, RankRecord& record);

/// Returns the memory limit of this process's cgroup (version 2 or 1), or nothing if there is none. The ranks that this
/// process starts are in the same cgroup.
std::optional<std::int64_t> memory_limit_bytes();

}  // namespace tessera
