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

#include "runtime/base/mutex.h"

namespace tessera {

/// Returns the error (75) of a wait for a worker whose connection has ended.
absl::Status worker_gone();

/// The workers of a run, as one parameter server knows them (ServedJob): who is there, and how far each is. A worker is
/// there from `join` to `leave`, which its connection's thread calls when the connection ends; nobody waits for one
/// that has left.
///
/// Where workers come and go ("sync.elastic"), server 0 also numbers them, says which one gives the first values, and
/// deals steps out: each number from 0 to the run's steps stands for the data of one step. A worker holds what it was
/// dealt until it has pushed; what it still holds when it leaves is dealt again, smallest number first. So each step is
/// made once, except that a worker that ends amid its push has pushed a part of it.
///
/// All functions may be called by several threads.
class JobMembers {
 public:
  /// A worker of an elastic run asks server 0 for any free number by this value. It joins the other servers under the
  /// number that it got.
  static constexpr int kAnyNumber = -1;
  static constexpr int kMostWorkers = 1 << 20;
  using IsGone = std::function<bool()>;  ///< whether the connection of the worker that waits has ended

  struct Member {
    std::int64_t computed = 0, pushed = 0;  ///< steps
    std::deque<std::int64_t> dealt;         ///< steps that it has not pushed, in the order in which it makes them
    bool rests = false;                     ///< it has no step to make, so nobody is ahead of it
  };

  /// `ranks`: the number of ranks; 0: workers come and go. `limit`: the longest wait.
  JobMembers(int ranks, std::chrono::milliseconds limit) : ranks_(ranks), limit_(limit) {}

  bool is_elastic() const { return ranks_ == 0; }
  /// Returns whether the run lasts after its last worker has left: it is elastic, and has begun.
  bool lasts() const;

  /// The place of a worker that has joined.
  struct Place {
    int number = 0;
    bool gives_values = false;  ///< it gives the servers their first values, and then calls `begin`
    std::int64_t steps = 0;     ///< its count of steps begins here: with that of the slowest worker
  };
  /// Registers a worker under the number `wanted`. Returns nothing where the worker has to ask again: another worker is
  /// about to give the first values, or an elastic run has the number for a worker whose connection has not ended yet.
  /// Error 64: a number that the run does not have, or that is there already.
  absl::StatusOr<std::optional<Place>> join(int wanted);
  void leave(int number);
  /// Says that the server has come back amid the run: all ranks are waited for in `await` until they have joined again,
  /// but no longer than `limit`.
  void expect_back(std::chrono::milliseconds limit);
  bool is_empty() const;

  void note(int number, std::int64_t computed, std::int64_t pushed);
  /// Waits until `has_come` is true for all other workers that are there. Error 75: one does not come in time, or
  /// `is_gone`.
  absl::Status await(const std::function<bool(int number, const Member& member)>& has_come, int number,
                     const IsGone& is_gone);

  /// Says that the servers have the first values. Error 64 if another worker is to give them.
  absl::Status begin(int number);

  /// The answer to a worker that asks for a step.
  struct Deal {
    enum class Kind {
      kStep,      ///< it makes `step`
      kAskAgain,  ///< other workers hold the last steps, and may leave before they make them
      kOwnFirst,  ///< this worker itself holds the last steps
      kOver       ///< all steps are made
    };
    Kind kind = Kind::kStep;
    std::int64_t step = 0;
    std::int64_t counted = 0;  ///< the worker's count of steps continues from here
    bool finishes = false;     ///< with kOver: whether this worker, and no other, writes the results
  };
  /// Deals one of the run's `steps` steps. Error 64: `steps` is below 1, or is another number than other workers have.
  absl::StatusOr<Deal> deal(int number, std::int64_t steps);

  /// A push of an elastic run lies between begin_push and end_push; begin_push waits while another worker holds the
  /// servers. Error 75 if the longest wait is over, or `is_gone`.
  absl::Status begin_push(int number, const IsGone& is_gone);
  void end_push();
  /// Lets no other worker push until `release`, or until this one leaves: values and states are then of one moment.
  /// Waits for pushes under way. Error 75 if the longest wait is over, or `is_gone`.
  absl::Status hold(int number, const IsGone& is_gone);
  void release(int number);

 private:
  using Clock = std::chrono::steady_clock;

  std::int64_t slowest() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  /// Waits a little for a change. Error 75: `deadline` has passed, or `is_gone`.
  absl::Status wait_on(Clock::time_point deadline, const IsGone& is_gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int ranks_;
  const std::chrono::milliseconds limit_;
  mutable Mutex mutex_;
  CondVar changed_;  ///< anything below has changed
  std::map<int, Member> members_ ABSL_GUARDED_BY(mutex_);
  std::set<int> expected_ ABSL_GUARDED_BY(mutex_);  ///< ranks that have not come back, which are waited for
  Clock::time_point expected_until_ ABSL_GUARDED_BY(mutex_);
  int next_number_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<int> giver_ ABSL_GUARDED_BY(mutex_);  ///< the worker that gives the first values
  bool has_values_ ABSL_GUARDED_BY(mutex_) = false;
  std::int64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;  ///< steps of the run; 0: nobody has asked for one
  std::int64_t next_step_ ABSL_GUARDED_BY(mutex_) = 0, made_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<std::int64_t> returned_ ABSL_GUARDED_BY(mutex_);  ///< steps of workers that have left
  std::optional<int> finisher_ ABSL_GUARDED_BY(mutex_), holder_ ABSL_GUARDED_BY(mutex_);
  int pushing_ ABSL_GUARDED_BY(mutex_) = 0;  ///< pushes under way
};

}  // namespace tessera
