#pragma once

// See docs/glossary.md: unit.

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "engine/asynchronous/servers/question_stream.h"
#include "engine/asynchronous/servers/server_link.h"
#include "runtime/base/log.h"
#include "runtime/base/mutex.h"

namespace tessera {

/// A worker's connection with one parameter server, and a thread that sends its questions and receives the answers
/// while the worker computes. The gradients of a unit are sent while backward makes the gradients of the next unit. The
/// values of a unit arrive while forward reads the previous unit. ServedShards has a ServerCourier for each server.
///
/// Questions are sent in the order of `send`, and the server answers in this order. If the connection breaks and the
/// server comes back after its end (KeptShards), the thread connects again; it tries this for as long as an answer may
/// take. It then finds out how many pushes the server has lost, and repeats all questions that were not answered. A
/// server applies no push twice.
///
/// One thread calls all functions.
class ServerCourier {
 public:
  using Clock = ServerLink::Clock;
  using Ticket = QuestionStream::Ticket;

  /// The data with which a worker connects to a server.
  struct Visit {
    std::string address;
    std::string name;  ///< "server 1 (10.0.0.5:4711)"
    std::string secret;
    std::string definition;  ///< definition of the shards (ServedJob)
    std::size_t shards = 0;  ///< number of the server's shards
    int rank = 0;
    std::int64_t life = 0;               ///< a number above 0, which no other worker of this rank has
    std::chrono::milliseconds limit{0};  ///< longest wait for an answer, and for the return of a server
    bool may_wait = true;                ///< whether the courier waits for a server to come back
  };

  explicit ServerCourier(Visit visit);
  /// Ends the connection. Questions and answers that are under way are dropped.
  ~ServerCourier();
  ServerCourier(const ServerCourier&) = delete;
  ServerCourier& operator=(const ServerCourier&) = delete;

  /// Connects, sends the secret, joins the run and starts the thread. Returns the answer to the join. Errors, which
  /// name the server: 78 if `address` is not an address; 75 if the server is not reached by `deadline`, or ends
  /// while it is asked and is not back within 10 s; 69 if the server is busy until `busy_until`; or the error with
  /// which the server refuses.
  absl::StatusOr<MessageHead> start(Clock::time_point deadline, Clock::time_point busy_until);

  /// Takes a question, and returns without waiting for the answer.
  Ticket send(ServerQuestion question);
  /// Returns once the question is over. From then on, `reply` and `status` of the ticket's question are valid.
  void wait(const Ticket& ticket);
  /// Says that the step is over, or begins anew. If the connection breaks, gradients that were sent with kStage before
  /// this call need not be sent again.
  void forget_staged();
  /// Returns the number of pushes that this worker knew of and that were lost when a server came back.
  std::int64_t lost_pushes() const { return lost_pushes_.load(); }
  /// Returns the number of times that this worker has joined the server again.
  std::int64_t returns() const { return returns_.load(); }

 private:
  absl::StatusOr<MessageHead> enter(Clock::time_point deadline, Clock::time_point busy_until, bool returns);
  absl::StatusOr<MessageHead> join(Clock::time_point busy_until, bool returns);
  /// Asks a question on a new connection, before all other questions, and waits for the answer.
  absl::StatusOr<MessageHead> ask_now(ServerQuestion question, ServerLink::Limit limit);
  void run();
  absl::Status move_bytes();
  bool take_next();
  absl::StatusOr<bool> send_some();
  void finish(const Ticket& ticket, absl::Status status);
  void fail_all(const absl::Status& why);
  absl::Status come_back(const absl::Status& why);
  absl::Status count_lost();
  void send_again();
  void wake() const;

  const Visit visit_;
  const LogRank log_rank_ = tessera::log_rank();
  bool comes_back_ = false;       ///< the server has said that it comes back after its end
  std::int64_t server_life_ = 0;  ///< ServedJob::life
  int number_;                    ///< the number under which this worker has joined, or wants to join
  int wake_ = -1;                 ///< an eventfd; writing to it ends a wait in poll(2)
  std::atomic<std::int64_t> lost_pushes_ = 0, returns_ = 0;

  Mutex mutex_;
  CondVar changed_;                   ///< signalled when a question is over
  std::unique_ptr<ServerLink> link_;  ///< only the courier's thread replaces it, under `mutex_`
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Ticket> queue_ ABSL_GUARDED_BY(mutex_);         ///< questions that were not begun
  std::vector<Ticket> staged_ ABSL_GUARDED_BY(mutex_);       ///< messages of this step that were sent and get no answer
  std::optional<MessageHead> note_ ABSL_GUARDED_BY(mutex_);  ///< the latest kNote
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);             ///< the failure after which nothing is sent any more; OK:
                                                             ///< none

  // Only the courier's thread uses these once it runs.
  QuestionStream under_way_;            ///< the questions that were begun and are not over
  int vain_returns_ = 0;                ///< number of times that the server has come back since it last answered a
                                        ///< question
  std::vector<std::int64_t> versions_;  ///< [shard]: the newest version that this worker knows of
  std::jthread thread_;                 // the thread is the last member, so that it is destroyed (joined) first
};

}  // namespace tessera
