#pragma once

// See docs/glossary.md: flat group.

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine/asynchronous/servers/job_members.h"
#include "engine/asynchronous/servers/kept_shards.h"
#include "engine/asynchronous/servers/server_link.h"
#include "engine/asynchronous/shard_rule.h"
#include "engine/asynchronous/shard_update.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/update_options.h"
#include "engine/step/rules/group_norms.h"
#include "runtime/base/mutex.h"
#include "sharding/arena.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// The shards that this server owns for one run of a job: a part of each trainable flat group, or whole groups, with
/// values, states, version and counts. ParameterServer makes a ServedJob when the first worker of a run comes, and
/// drops it when the last worker has gone, unless the run lasts longer (JobMembers::lasts). All functions may be called
/// by several threads, one for each worker.
///
/// The server has no module. A worker sends a definition. The definition begins with the run's name of kRunName
/// letters, which no other run has. JSON follows, with the strategy, the sizes of all parameters and their groups. The
/// layouts, and the owner of each part (ServedCut), follow from these. All workers of a run send the same definition.
///
/// If the server keeps its shards (KeepOptions), a thread copies each shard that has changed, and writes the copy. A
/// push is answered when at most `lose` pushes to its shard, this push included, are missing on the disk. A worker's
/// write of values is answered when the values are on the disk. So when the server ends, each shard loses at most
/// `lose` of the pushes that were answered. A push that was not answered is sent again, and applied once: a shard has
/// the number of the last step that each worker has pushed. The data of server 0 about workers that come and go are
/// kept beside the shards (`keep_members`).
///
/// Invariants:
///  1. The holder of a shard's mutex computes nothing but an update of the shard, and waits for nothing but the shard's
///     turn and the disk. (Ranges of elements are sent and received under the mutex too. No rank pushes then: all ranks
///     wait for each other, or the servers of an elastic run hold back pushes.)
///  2. No worker waits for a worker that has ended.
class ServedJob {
 public:
  static constexpr std::size_t kRunName = 32;
  /// The time for which a server awaits the workers that were connected to an earlier server. It is longer than a
  /// worker needs to notice that the server has come back.
  static constexpr std::chrono::milliseconds kForReturns{10'000};
  /// Returns the name of the run in a definition.
  static std::string run_of(const std::string& definition) { return definition.substr(0, kRunName); }

  /// `keep`: where and how shards are kept; no value: the shards are lost with this object. If shards of the same run
  /// were kept, they are read. `offload`: folder for a scratch file with the shards, which is mapped; empty: they are
  /// in memory. Errors: 78 for a text that is no definition; those of KeptShards and BlockFile.
  static absl::StatusOr<std::unique_ptr<ServedJob>> make(const std::string& definition,
                                                         const std::optional<KeepOptions>& keep,
                                                         const std::string& offload);
  /// Writes the changes of kept shards that are not on the disk yet.
  ~ServedJob();
  ServedJob(const ServedJob&) = delete;
  ServedJob& operator=(const ServedJob&) = delete;

  /// Returns whether shards outlive the server.
  bool is_kept() const { return kept_ != nullptr; }
  /// Returns a number above 0 that no other object for this run has. If the number changes, a worker knows that its
  /// server was lost.
  std::int64_t life() const { return life_; }
  /// Returns whether kept shards of this run were found and read.
  bool has_come_back() const { return has_come_back_; }
  const std::string& definition() const { return definition_; }
  std::int64_t bytes() const { return memory_.bytes(); }

  JobMembers& members() { return *members_; }
  /// Registers a worker (JobMembers::join). At server 0 of an elastic run whose shards are kept, the worker's number is
  /// on the disk when this returns.
  absl::StatusOr<std::optional<JobMembers::Place>> join(int wanted, bool returns);
  void leave(int number);

  /// The data that a worker's thread keeps from message to message. The job outlives this object.
  class Worker {
   public:
    /// `life`: the number that the worker sent when it joined (MessageKind). `is_gone`: returns whether the worker's
    /// connection has ended, so that the worker's thread stops waiting.
    Worker(ServedJob& job, int rank, std::int64_t life, std::function<bool()> is_gone);

    /// Receives the payload of `head`, and answers the question. Error 75 if the connection is lost, or if the message
    /// does not fit the definition.
    absl::Status answer(const MessageHead& head, ServerLink& link);

   private:
    absl::Status take(std::span<std::byte> bytes, ServerLink& link);
    absl::Status do_copies(const MessageHead& head, ServerLink& link);
    absl::Status do_push(const MessageHead& head, ServerLink& link);
    absl::Status do_stage(const MessageHead& head, ServerLink& link);
    absl::Status do_versions(const MessageHead& head, ServerLink& link);
    absl::Status do_wait(const MessageHead& head, ServerLink& link);
    absl::Status do_elastic(const MessageHead& head, ServerLink& link);
    absl::Status do_counts(const MessageHead& head, ServerLink& link);
    absl::Status do_range(const MessageHead& head, ServerLink& link);

    ServedJob& job_;
    const int rank_;
    const std::int64_t life_;
    const std::function<bool()> is_gone_;
    LearningRates rates_;
    UpdateOptions options_;
    ShardRule rule_;
    ShardUpdate update_;
    std::vector<double> numbers_, known_options_;  ///< `numbers_`: rates, then options; `known_options_`: the options
                                                   ///< that `rule_` uses
    std::vector<char> used_;
    Arena room_;   ///< memory for the gradients of the largest shard, and for the values with which they were made
    Arena work_;   ///< PushedShard::work
    Arena early_;  ///< memory for gradients of all shards that arrive before their push (kStage); empty until the first
                   ///< of them arrives
    std::vector<char> is_early_;  ///< [group]: whether the group's gradients have arrived
  };

 private:
  using Clock = std::chrono::steady_clock;

  /// A worker's latest push to a shard.
  struct LastPush {
    std::int64_t life = 0, step = 0;
  };
  struct Group {
    FlatGroup* flat = nullptr;
    Extent part;
    std::int64_t first = 0;           ///< number of elements in this server's parts of the groups before this one
    StateFormats formats;             ///< states of an element
    std::optional<GroupNorms> norms;  ///< set under lamb and lars; used under the mutex
    Mutex mutex;
    CondVar turned;  ///< `played` has changed
    CondVar saved;   ///< `kept` has changed
    std::int64_t version ABSL_GUARDED_BY(mutex) = 0, played ABSL_GUARDED_BY(mutex) = 0;
    std::int64_t first_version ABSL_GUARDED_BY(mutex) = 0;  ///< version that the shard had when the server came back
    std::vector<std::int64_t> counts ABSL_GUARDED_BY(mutex);
    std::vector<LastPush> last ABSL_GUARDED_BY(mutex);  ///< [rank]
    /// The number of changes to the shard so far, the number of these changes that are on the disk, and the number that
    /// must be on the disk before a waiting push is answered.
    std::int64_t changes ABSL_GUARDED_BY(mutex) = 0, kept ABSL_GUARDED_BY(mutex) = 0, wanted ABSL_GUARDED_BY(mutex) = 0;
    float* mean_squares = nullptr;
  };

  ServedJob() = default;
  absl::Status place_all(const std::string& offload);
  void place(Group& group, bool is_adaptive);
  static std::vector<std::span<std::byte>> run_of(const Group& group, Extent run, bool is_of_tensors, bool has_values);
  /// Waits for the turn of a pull or push, if a recorded order is replayed. REQUIRES: the group's mutex is held.
  absl::Status await_turn(Group& group, std::int64_t turn, const std::function<bool()>& is_gone) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(group.mutex);
  void end_turn(Group& group, std::int64_t turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(group.mutex);
  /// Waits until at most `lose` of the shard's changes so far are not on the disk.
  absl::Status await_kept(Group& group, std::int64_t lose, const std::function<bool()>& is_gone)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(group.mutex);
  absl::Status begin_keeping(const KeepOptions& options);
  absl::Status restore_members();
  /// Writes the data of server 0 about workers that come and go, if shards are kept and these data have changed.
  absl::Status keep_members();
  /// Writes the shards for which a write is due (keep_shard). `image` is memory for one of them.
  absl::Status keep_shards(bool all, std::vector<std::byte>& image);
  /// Writes a shard if more than `lose` / 2 of its changes are unwritten, or if a push waits for an unwritten change.
  /// With `all`, it writes the shard if any change is unwritten.
  absl::Status keep_shard(std::size_t index, bool all, std::vector<std::byte>& image);
  /// Returns the elements of a shard's image: values, states, and means of squares.
  std::vector<std::span<std::byte>> data_of(const Group& group) const;
  void write_image(const Group& group, std::vector<std::byte>& image) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(group.mutex);
  /// Reads the image of a shard into `group`. Returns false if it is not an image of this shard.
  bool read_image(Group& group, std::span<const std::byte> image) ABSL_EXCLUSIVE_LOCKS_REQUIRED(group.mutex);
  /// Returns whether first values come too late for a group of a run whose workers come and go. At server 0 they come
  /// too late once the run has begun; at other servers, once a worker has pushed to the group.
  bool has_begun(std::size_t group);
  /// Returns the number of the next event, which is larger than `seen` and larger than all earlier numbers.
  std::int64_t tick(std::int64_t seen);

  std::string definition_;
  std::int64_t life_ = 1 + static_cast<std::int64_t>(std::random_device()());
  Strategy strategy_;
  int server_ = 0;                      ///< this server's number among the servers of the run
  std::chrono::milliseconds limit_{0};  ///< comm.timeout_s: the longest wait, and the longest pause in a message
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::int64_t largest_ = 0;   ///< elements of the largest shard
  std::int64_t elements_ = 0;  ///< elements of all shards
  std::int64_t work_ = 0;      ///< fp32 elements of scratch for a push to any shard
  Arena memory_;

  std::unique_ptr<JobMembers> members_;
  Mutex mutex_;
  std::int64_t clock_ ABSL_GUARDED_BY(mutex_) = 0;
  Mutex members_mutex_;  ///< one thread at a time writes the image of `members_`
  std::int64_t kept_changes_ ABSL_GUARDED_BY(members_mutex_) = 0;  ///< JobMembers::changes of the image on the disk

  std::unique_ptr<KeptShards> kept_;  ///< null where shards are not kept
  bool has_come_back_ = false;
  std::unique_ptr<KeepingThread> keeping_;  // the thread uses the members above, so this member is destroyed first
};

}  // namespace tessera
