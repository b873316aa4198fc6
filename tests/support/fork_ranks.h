#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/status.h"
#include "runtime/comm/key_value_store.h"

namespace tessera {

/// A store in memory that forked processes share. Made before the fork.
std::shared_ptr<KeyValueStore> forked_store();

/// How a forked rank ended.
struct RankEnd {
  ExitCode exit_code = ExitCode::kOk;  ///< of the status its body returned; kInternal if it threw
  int signal = 0;                      ///< that killed it, or 0
  std::string message;                 ///< of that status or exception
};

/// Ranks as forked processes, to kill and stop for real. Children that still run when this goes are killed.
class ForkedRanks {
 public:
  using Body = std::function<absl::Status(int rank, KeyValueStore& store)>;

  ForkedRanks(int ranks, const Body& body);
  ~ForkedRanks();

  pid_t pid(int rank) const { return pids_[rank]; }
  void signal(int rank, int number) const;
  /// Waits until `rank` ended, `limit` at most; then kills it and reports that signal.
  RankEnd wait(int rank, std::chrono::milliseconds limit = std::chrono::seconds(30));
  KeyValueStore& store() { return *store_; }

 private:
  std::shared_ptr<KeyValueStore> store_;
  std::vector<pid_t> pids_;
};

/// Runs `body` on forked ranks and returns how each ended.
std::vector<RankEnd> fork_ranks(int ranks, const ForkedRanks::Body& body);

}  // namespace tessera
