#pragma once

// See docs/glossary.md: flat group.

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/asynchronous/servers/job_members.h"
#include "engine/asynchronous/servers/server_link.h"
#include "engine/asynchronous/shard_update.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/update_options.h"
#include "engine/step/rules/element_update.h"
#include "runtime/base/mutex.h"
#include "sharding/arena.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// The shards of one run of a job that this server owns: its part of each trainable flat group, with values, states,
/// version and counts. ParameterServer makes it when the first worker of a run comes, and drops it when the last one
/// has gone. All functions may be called by several threads, one for each worker.
///
/// It has no module. A worker sends a definition: a name that no other run has, of kRunName letters, and then JSON with
/// the strategy, the sizes of all parameters and their groups, from which the layouts follow. All workers of a run send
/// the same.
///
/// Invariants:
///  1. Who holds a shard's mutex computes nothing but its update, and waits for nothing but the shard's turn. (Ranges
///     of elements are sent and received under it; nobody pushes then, since ranks have met.)
///  2. A worker that ends is waited for by nobody.
class ServedJob {
 public:
  static constexpr std::size_t kRunName = 32;
  /// Returns the name of the run in a definition.
  static std::string run_of(const std::string& definition) { return definition.substr(0, kRunName); }

  /// Error 78 for a definition that is none.
  static absl::StatusOr<std::unique_ptr<ServedJob>> make(const std::string& definition);

  const std::string& definition() const { return definition_; }
  std::int64_t bytes() const { return memory_.bytes(); }

  JobMembers& members() { return *members_; }

  /// What a worker's thread keeps from message to message. The job outlives it.
  class Worker {
   public:
    /// `is_gone`: says that the worker's connection has ended, so that it waits for nothing any more.
    Worker(ServedJob& job, int rank, std::function<bool()> is_gone);

    /// Receives the payload of `head`, does what it asks for, and answers. Error 75: the connection is lost, or the
    /// message does not fit the definition.
    absl::Status answer(const MessageHead& head, ServerLink& link);

   private:
    absl::Status take(std::span<std::byte> bytes, ServerLink& link);
    absl::Status do_copies(const MessageHead& head, ServerLink& link);
    absl::Status do_push(const MessageHead& head, ServerLink& link);
    absl::Status do_wait(const MessageHead& head, ServerLink& link);
    absl::Status do_elastic(const MessageHead& head, ServerLink& link);
    absl::Status do_counts(const MessageHead& head, ServerLink& link);
    absl::Status do_range(const MessageHead& head, ServerLink& link);

    ServedJob& job_;
    const int rank_;
    const std::function<bool()> is_gone_;
    LearningRates rates_;
    UpdateOptions options_;
    ElementUpdate rule_;
    ShardUpdate update_;
    std::vector<double> numbers_, known_options_;  ///< rates, then options; the options that `rule_` has
    std::vector<char> used_;
    Arena room_;  ///< for the gradients of the largest shard, and for the values with which they were made
  };

 private:
  using Clock = std::chrono::steady_clock;

  struct Group {
    FlatGroup* flat = nullptr;
    Extent part;
    Mutex mutex;
    CondVar turned;  ///< `played` has changed
    std::int64_t version ABSL_GUARDED_BY(mutex) = 0, played ABSL_GUARDED_BY(mutex) = 0;
    std::vector<std::int64_t> counts ABSL_GUARDED_BY(mutex);
    float* mean_squares = nullptr;
  };

  ServedJob() = default;
  void place_all(int server, int servers);
  /// Waits for the turn of a pull or push, if an order is played. REQUIRES: the group's mutex is held.
  absl::Status await_turn(Group& group, std::int64_t turn, const std::function<bool()>& is_gone) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(group.mutex);
  void end_turn(Group& group, std::int64_t turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(group.mutex);
  /// Returns the number of the next event, which is larger than `seen` and than all before.
  std::int64_t tick(std::int64_t seen);

  std::string definition_;
  Strategy strategy_;
  std::chrono::milliseconds limit_{0};  ///< comm.timeout_s: the longest wait, and the longest standstill amid a message
  std::size_t states_ = 0;              ///< number of states of an element
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::int64_t largest_ = 0;  ///< elements of the largest shard
  Arena memory_;

  std::unique_ptr<JobMembers> members_;
  Mutex mutex_;
  std::int64_t clock_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
