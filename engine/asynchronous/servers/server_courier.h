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
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/asynchronous/servers/server_link.h"
#include "runtime/base/log.h"
#include "runtime/base/mutex.h"

namespace tessera {

/// A question of a worker to a server, from its beginning to its answer. ServerCourier::send takes one.
struct ServerQuestion {
  MessageHead head;                                   ///< the courier fills in `bytes`
  std::vector<std::byte> front = {};                  ///< the first bytes of the payload, which are kept here
  std::vector<std::span<const std::byte>> rest = {};  ///< the bytes behind `front`: they stay in place until the answer
  std::vector<std::span<std::byte>> answer = {};      ///< where the payload of the answer goes

  // These are valid once the question is over (ServerCourier::wait).
  MessageHead reply = {};
  absl::Status status = {};  ///< the server's refusal, or why the connection is lost
  bool is_over = false;
};

/// A worker's connection with one parameter server, and a thread that sends its questions and receives the answers
/// while the worker computes. The gradients of a unit are sent while backward makes those of the next unit. The values
/// of a unit arrive while forward reads the unit before. ServedShards has one for each server.
///
/// Questions are sent in the order of `send`, and the server answers in this order. A connection that breaks is made
/// anew if the server comes back after its end (KeptShards): the thread tries for as long as an answer may take. It
/// then says which pushes the server has lost, and sends the questions again that were not answered. A server applies
/// no push twice.
///
/// One thread calls all of it.
class ServerCourier {
 public:
  using Clock = ServerLink::Clock;
  using Ticket = std::shared_ptr<ServerQuestion>;

  /// What a worker tells a server when it connects.
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

  /// Connects, sends the secret, joins the run and starts the thread. Returns the answer to the join. The errors name
  /// the server: 78 for a text that is no address, 75 where it is not reached by `deadline`, 69 where it is busy until
  /// `busy_until`, and what it refuses.
  absl::StatusOr<MessageHead> start(Clock::time_point deadline, Clock::time_point busy_until);

  /// Takes a question, and returns at once.
  Ticket send(ServerQuestion question);
  /// Returns once the question is over. `reply` and `status` of the ticket's question are valid then.
  void wait(const Ticket& ticket);
  /// Says that the step is over, or begins anew. Gradients that were sent with kStage need not be sent again.
  void forget_staged();
  /// Returns how many of the pushes that this worker knew of were lost when a server came back.
  std::int64_t lost_pushes() const { return lost_pushes_.load(); }
  /// Returns how often this worker has joined the server anew.
  std::int64_t returns() const { return returns_.load(); }

 private:
  absl::StatusOr<MessageHead> enter(Clock::time_point deadline, Clock::time_point busy_until, bool returns);
  absl::StatusOr<MessageHead> join(Clock::time_point busy_until, bool returns);
  /// Asks a question and waits for its answer, ahead of all others, on a new connection.
  absl::StatusOr<MessageHead> ask_now(ServerQuestion question);
  absl::Status exchange(const Ticket& ticket);
  void run();
  absl::Status move_bytes();
  bool take_next();
  absl::StatusOr<bool> send_some();
  absl::StatusOr<bool> receive_some();
  absl::Status begin_answer();
  void end_answer();
  void expect_head();
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
  int number_;                    ///< the number under which this worker has joined, or wants to
  int wake_ = -1;                 ///< an eventfd, which ends a poll
  std::atomic<std::int64_t> lost_pushes_ = 0, returns_ = 0;

  Mutex mutex_;
  CondVar changed_;                   ///< a question is over
  std::unique_ptr<ServerLink> link_;  ///< only the courier's thread replaces it, under `mutex_`
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Ticket> queue_ ABSL_GUARDED_BY(mutex_);         ///< questions that were not begun
  std::vector<Ticket> staged_ ABSL_GUARDED_BY(mutex_);       ///< this step's messages that were sent and get no answer
  std::optional<MessageHead> note_ ABSL_GUARDED_BY(mutex_);  ///< the latest kNote
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);             ///< why nothing is sent any more

  // Only the courier's thread uses these once it runs.
  Ticket sending_;                                  ///< the question of which not all was sent
  std::vector<std::span<const std::byte>> pieces_;  ///< head and payload of `sending_`, without empty parts
  std::size_t piece_ = 0, offset_ = 0;              ///< the next byte to send: its piece, and its position in the piece
  std::deque<Ticket> sent_;                         ///< questions whose answers are to come
  MessageHead head_;                                ///< head of the answer that is being received
  std::string text_;                                ///< text of a refusal that is being received
  std::vector<std::span<std::byte>> places_;        ///< where received bytes are written
  std::size_t place_ = 0, filled_ = 0;
  bool is_head_ = true;                 ///< whether a head is being received
  int vain_returns_ = 0;                ///< how often the server came back since it last answered
  std::vector<std::int64_t> versions_;  ///< [shard]: the newest version that this worker knows of
  std::jthread thread_;                 // it is destroyed first
};

}  // namespace tessera
