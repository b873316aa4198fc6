#pragma once

// See docs/glossary.md: dealt.

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "runtime/base/mutex.h"

namespace tessera {

/// Returns the error (75) for a worker whose connection ended while it waited.
absl::Status worker_gone();

/// The data of one parameter server about the workers of a run (ServedJob): which workers have joined, and how many
/// steps each has made. A worker counts as present from `join` to `leave`. Its connection's thread calls `leave` when
/// the connection ends. No worker waits for a worker that has left.
///
/// Where workers come and go ("sync.elastic"), server 0 also numbers the workers, says which worker gives the first
/// values, and deals out steps. Each number below the run's number of steps stands for the data of one step. A worker
/// holds the steps that it was dealt until it has pushed them. Steps that it still holds when it leaves are dealt
/// again, smallest number first. So each step is made once, with one exception: if a worker ends during its push, a
/// part of that push may have been applied, and the step is dealt again.
///
/// A server that keeps its shards writes the image of this object beside them (`image`), before it answers a question
/// that changes numbers or deals. When it has come back (`restore`), the workers of the image are *away*: each may join
/// again under its number, and still has the steps that it held. Workers that do not come in time have left.
///
/// All functions may be called by several threads.
class JobMembers {
 public:
  /// A worker of an elastic run passes this value to ask server 0 for any free number. It joins the other servers under
  /// the number that it got.
  static constexpr int kAnyNumber = -1;
  static constexpr int kMostWorkers = 1 << 20;
  using IsGone = std::function<bool()>;  ///< whether the connection of the worker that waits has ended

  struct Member {
    std::int64_t computed = 0, pushed = 0;  ///< numbers of steps
    std::int64_t taken = 0;                 ///< number of steps dealt to the worker so far
    std::deque<std::int64_t> dealt;         ///< steps dealt to the worker and not pushed yet, in the order in which the
                                            ///< worker makes them
    /// Whether the worker has not pulled for its first step yet, or has no step to make. Other workers are then not
    /// counted as ahead of it.
    bool rests = false;
  };

  /// `ranks`: the number of ranks; 0: workers come and go. `limit`: the longest wait.
  JobMembers(int ranks, std::chrono::milliseconds limit) : ranks_(ranks), limit_(limit) {}

  bool is_elastic() const { return ranks_ == 0; }
  /// Returns whether the run continues to exist after its last worker has left. Only an elastic run that has begun
  /// does.
  bool lasts() const;

  /// The result of `join` for a worker that has joined.
  struct Place {
    int number = 0;
    bool gives_values = false;  ///< the worker gives the servers their first values, then calls `begin`
  };
  /// Registers a worker under the number `wanted`. `returns`: the worker was in the run before, and has lost its
  /// connection. Returns nothing if the worker has to ask again: another worker is about to give the first values, or
  /// the number of an elastic run still belongs to a worker whose connection has not ended yet. Errors: 64 if the run
  /// does not have this number, or if another worker has joined with it already; 69 for a worker that returns and whose
  /// steps are dealt again.
  absl::StatusOr<std::optional<Place>> join(int wanted, bool returns = false);
  void leave(int number);
  /// Says that the server has come back during the run. All ranks, or the workers of the image, are then away for at
  /// most `limit`. They may join again in this time, and `await` waits for them.
  void expect_back(std::chrono::milliseconds limit);
  bool is_empty() const;

  /// Returns the numbers that server 0 of an elastic run needs when it comes back, and the number of changes to these
  /// numbers so far.
  std::pair<std::vector<std::int64_t>, std::int64_t> image() const;
  std::int64_t changes() const;
  /// Takes the numbers that `image` returned. Returns false if they are not the numbers of an image. REQUIRES: no
  /// worker has joined.
  bool restore(std::span<const std::int64_t> image);

  void note(int number, std::int64_t computed, std::int64_t pushed);
  struct Begun {
    std::int64_t counted = 0;  ///< the worker's count of steps; the next step is counted from this number on
    bool has_rested = false;
  };
  /// Says that the worker pulls for a step. If the worker rested, the other workers wait for it from now on, and its
  /// count of steps becomes at least the slowest worker's count.
  Begun begin_step(int number);
  /// Waits until `has_come` is true for all other workers that are present or away. It does not wait for workers that
  /// rest. Error 75 if a worker does not come in time, or if `is_gone` returns true.
  absl::Status await(const std::function<bool(int number, const Member& member)>& has_come, int number,
                     const IsGone& is_gone);

  /// Says that the servers have the first values. Error 64 if another worker is to give them.
  absl::Status begin(int number);

  /// The answer to a worker that asks for a step.
  struct Deal {
    enum class Kind {
      kStep,      ///< the worker makes `step`
      kAskAgain,  ///< other workers hold the last steps, or the worker that writes the results is away; these workers
                  ///< may be gone
      kOwnFirst,  ///< this worker itself holds the last steps
      kOver       ///< all steps are made
    };
    Kind kind = Kind::kStep;
    std::int64_t step = 0;
    bool finishes = false;  ///< with kOver: whether this worker writes the results; no other worker that is present
                            ///< does
  };
  /// Deals one of the run's `steps` steps. `taken`: the number of steps that were dealt to the worker, as far as the
  /// worker knows. If more steps were dealt to the worker, it gets the last of them again, since the answer was
  /// lost when the server ended. `data_order`: a number that stands for the data of all steps. Error 64 if `steps` is
  /// below 1, or if other workers have given another `steps` or `data_order`.
  absl::StatusOr<Deal> deal(int number, std::int64_t steps, std::int64_t taken, std::int64_t data_order = 0);
  /// Says that the results are written, so that no worker is told again to write them. Error 64 for a worker that was
  /// not told to write them.
  absl::Status end_results(int number);

  /// A push of an elastic run lies between begin_push and end_push; begin_push waits while another worker holds back
  /// pushes (`hold`). Error 75 if the longest wait is over, or if `is_gone` returns true.
  absl::Status begin_push(int number, const IsGone& is_gone);
  void end_push();
  /// Lets no other worker push until `release`, or until this worker leaves. Until then values and states do not
  /// change. Waits for pushes under way. Error 75 if the longest wait is over, or if `is_gone` returns true.
  absl::Status hold(int number, const IsGone& is_gone);
  void release(int number);

 private:
  using Clock = std::chrono::steady_clock;

  std::int64_t slowest() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Lets the steps of a worker that has left be dealt again.
  void give_up(int number, const Member& member) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Gives up the workers that are away and have not come back in time.
  void give_up_late() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void note_change() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Waits a little for a change. Error 75 if `deadline` has passed, or if `is_gone` returns true.
  absl::Status wait_on(Clock::time_point deadline, const IsGone& is_gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int ranks_;
  const std::chrono::milliseconds limit_;
  mutable Mutex mutex_;
  CondVar changed_;  ///< signalled when any member below has changed
  std::map<int, Member> members_ ABSL_GUARDED_BY(mutex_);
  std::map<int, Member> away_ ABSL_GUARDED_BY(mutex_);  ///< workers that may come back to a server that has come back
  Clock::time_point away_until_ ABSL_GUARDED_BY(mutex_);
  std::int64_t changes_ ABSL_GUARDED_BY(mutex_) = 0;  ///< changes to the image
  int next_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<int> giver_ ABSL_GUARDED_BY(mutex_);  ///< the worker that gives the first values
  bool has_values_ ABSL_GUARDED_BY(mutex_) = false;
  std::int64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;       ///< steps of the run; 0: no worker has asked for a step
  std::int64_t data_order_ ABSL_GUARDED_BY(mutex_) = 0;  ///< valid if `steps_` is not 0
  std::int64_t next_step_ ABSL_GUARDED_BY(mutex_) = 0, made_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::int64_t> returned_ ABSL_GUARDED_BY(mutex_);  ///< steps of workers that have left
  std::optional<int> finisher_ ABSL_GUARDED_BY(mutex_), holder_ ABSL_GUARDED_BY(mutex_);
  bool are_written_ ABSL_GUARDED_BY(mutex_) = false;  ///< whether the results are written
  int pushing_ ABSL_GUARDED_BY(mutex_) = 0;           ///< pushes under way
};

}  // namespace tessera
