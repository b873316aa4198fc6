#pragma once

#include <gtest/gtest.h>
#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/key_value_store.h"
#include "tests/support/limits/patience.h"

namespace tessera {

/// Makes a store in memory that forked processes share. It must be made before the fork.
std::shared_ptr<KeyValueStore> forked_store();

/// The exit code, signal and message of a forked rank.
struct RankEnd {
  ExitCode exit_code = ExitCode::kOk;  ///< the exit code of the body's status, or kInternal if the body threw
  int signal = 0;                      ///< the signal that killed the rank, or 0 if there was none
  std::string message;                 ///< the message of the status or exception of the rank's body
};

/// Expects that a rank has ended by itself, with success.
inline void expect_ok(const RankEnd& end, int rank) {
  EXPECT_EQ(end.signal, 0) << "rank " << rank;
  EXPECT_EQ(end.exit_code, ExitCode::kOk) << "rank " << rank << ": " << end.message;
}

/// Ranks that are forked processes. Tests can kill and stop them for real. The destructor kills children that still
/// run.
class ForkedRanks {
 public:
  using Body = std::function<absl::Status(int rank, KeyValueStore& store)>;

  ForkedRanks(int ranks, const Body& body);
  ~ForkedRanks();

  pid_t pid(int rank) const { return pids_[rank]; }
  void signal(int rank, int number) const;
  /// Waits until `rank` has ended, or until the limit for `at_rest` on a machine at rest has passed (patience.h). If
  /// the limit passes, the function kills the rank and reports SIGKILL.
  RankEnd wait(int rank, std::chrono::duration<double> at_rest = std::chrono::seconds(30));
  /// Does the same with `limit`, which several calls can share.
  RankEnd wait(int rank, Deadline& limit);
  KeyValueStore& store() { return *store_; }

 private:
  std::shared_ptr<KeyValueStore> store_;
  std::vector<pid_t> pids_;
};

/// Waits for the ranks `first` to `end` - 1, and expects that each has ended by itself, with success.
inline void expect_ok(ForkedRanks& ranks, int first, int end) {
  for (int rank = first; rank < end; ++rank) expect_ok(ranks.wait(rank), rank);
}

/// Waits until a rank has set `key`, and returns its value. `at_rest`: the time that this takes at most on a machine at
/// rest. Returns an error if the limit that belongs to this time passes before that (Deadline).
absl::StatusOr<std::string> told(KeyValueStore& store, const std::string& key,
                                 std::chrono::duration<double> at_rest = std::chrono::seconds(20));

/// Runs `body` on forked ranks and returns how each rank ended.
std::vector<RankEnd> fork_ranks(int ranks, const ForkedRanks::Body& body);

}  // namespace tessera
