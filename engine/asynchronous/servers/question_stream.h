#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/asynchronous/servers/server_link.h"

namespace tessera {

/// A question of a worker to a server, from its beginning to its answer. ServerCourier::send takes it.
struct ServerQuestion {
  MessageHead head;                                   ///< the courier fills in `bytes`
  std::vector<std::byte> front = {};                  ///< the first bytes of the payload
  std::vector<std::span<const std::byte>> rest = {};  ///< the bytes of the payload behind `front`; they stay in place
                                                      ///< until the answer
  std::vector<std::span<std::byte>> answer = {};      ///< memory for the payload of the answer

  // These are valid once the question is over (ServerCourier::wait).
  MessageHead reply = {};
  absl::Status status = {};  ///< an error if the server has refused the question, or if the connection is lost
  bool is_over = false;
};

/// Pieces of memory whose bytes are sent, or received, one after the other.
template <class Byte>
class BytesInTurn {
 public:
  void begin(std::vector<std::span<Byte>> pieces) {
    std::erase_if(pieces, [](const std::span<Byte>& piece) { return piece.empty(); });
    pieces_ = std::move(pieces);
    piece_ = offset_ = 0;
  }
  bool is_over() const { return piece_ == pieces_.size(); }
  /// Returns whether the next byte is in the last piece.
  bool is_last() const { return piece_ + 1 == pieces_.size(); }
  /// Returns the bytes that are left of the piece with the next byte. REQUIRES: !is_over().
  std::span<Byte> rest() const { return pieces_[piece_].subspan(offset_); }
  /// Says that the next `count` bytes were sent or received. They are in `rest`.
  void move(std::size_t count) {
    offset_ += count;
    if (offset_ < pieces_[piece_].size()) return;
    offset_ = 0;
    ++piece_;
  }

 private:
  std::vector<std::span<Byte>> pieces_;
  std::size_t piece_ = 0, offset_ = 0;
};

/// The questions of a ServerCourier that are on their way over its connection, and the answers that come back. Answers
/// come in the order of the questions, and each fits its question; any other answer is an error. One thread calls all
/// functions.
class QuestionStream {
 public:
  using Ticket = std::shared_ptr<ServerQuestion>;
  /// A function that gets each question that is over: the answer has come, or the whole question was sent and gets no
  /// answer.
  using End = std::function<void(const Ticket& question, absl::Status status)>;

  /// `server`: the server's name, with which the texts of its refusals begin. `end` is called in send_some,
  /// receive_some and ask_now.
  QuestionStream(std::string server, End end) : server_(std::move(server)), end_(std::move(end)) { expect_head(); }
  QuestionStream(const QuestionStream&) = delete;
  QuestionStream& operator=(const QuestionStream&) = delete;

  bool is_sending() const { return sending_ != nullptr; }
  /// Returns whether no question is being sent, and no answer is to come.
  bool is_idle() const { return !sending_ && sent_.empty(); }
  /// Returns the number of questions whose answers are to come.
  std::size_t unanswered() const { return sent_.size(); }

  /// Takes the question to send next. REQUIRES: !is_sending().
  void begin(Ticket question);
  /// Sends bytes of the question that was begun. Returns whether any bytes could be sent without waiting. REQUIRES:
  /// is_sending().
  absl::StatusOr<bool> send_some(ServerLink& link);
  /// Receives the bytes that have arrived. Returns whether any bytes had arrived. Error 75 for an answer that does not
  /// fit its question.
  absl::StatusOr<bool> receive_some(ServerLink& link);

  /// Sends a question on a new connection, and waits until it is over. Its answer comes before the answers to all other
  /// questions. Each wait is at most `limit`.
  absl::Status ask_now(const Ticket& question, ServerLink& link, ServerLink::Limit limit);
  /// Returns the questions that are not over, in the order in which they were asked, and forgets them.
  std::vector<Ticket> take_all();

 private:
  void expect_head();
  absl::Status begin_answer();
  void end_answer();
  absl::Status exchange(const Ticket& question, ServerLink& link, ServerLink::Limit limit);

  const std::string server_;
  const End end_;
  Ticket sending_;                         ///< the question of which only a part was sent
  BytesInTurn<const std::byte> outgoing_;  ///< head and payload of `sending_`
  std::deque<Ticket> sent_;                ///< questions whose answers are to come
  MessageHead head_;                       ///< head of the answer that is being received
  std::string text_;                       ///< text of a refusal that is being received
  BytesInTurn<std::byte> incoming_;        ///< where received bytes are written
  bool is_head_ = true;                    ///< whether a head is being received
};

}  // namespace tessera
