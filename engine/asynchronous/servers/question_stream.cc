#include "engine/asynchronous/servers/question_stream.h"

#include <cstdint>

#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::int64_t kMostText = std::int64_t{1} << 20;

bool has_answer(MessageKind kind) { return kind != MessageKind::kNote && kind != MessageKind::kStage; }

absl::Status strange_answer() {
  return make_error(
      ExitCode::kPeerLost,
      "an answer does not fit its question. [T1011] hint: run `tessera serve` of the workers' own version");
}

}  // namespace

void QuestionStream::begin(Ticket question) {
  sending_ = std::move(question);
  std::vector<std::span<const std::byte>> pieces = {bytes_of(sending_->head), sending_->front};
  pieces.insert(pieces.end(), sending_->rest.begin(), sending_->rest.end());
  outgoing_.begin(std::move(pieces));
}

absl::StatusOr<bool> QuestionStream::send_some(ServerLink& link) {
  bool has_moved = false;
  while (!outgoing_.is_over()) {
    TESSERA_ASSIGN_OR_RETURN(const std::size_t sent, link.send_some(outgoing_.rest(), /*more=*/!outgoing_.is_last()));
    if (sent == 0) return has_moved;
    has_moved = true;
    outgoing_.move(sent);
  }
  const Ticket whole = std::exchange(sending_, nullptr);
  if (has_answer(whole->head.kind)) {
    sent_.push_back(whole);
  } else {
    end_(whole, absl::OkStatus());
  }
  return has_moved;
}

absl::StatusOr<bool> QuestionStream::receive_some(ServerLink& link) {
  bool has_moved = false;
  for (;;) {
    if (incoming_.is_over()) {
      if (is_head_) {
        TESSERA_RETURN_IF_ERROR(begin_answer());
      } else {
        end_answer();
      }
      continue;
    }
    TESSERA_ASSIGN_OR_RETURN(const std::size_t got, link.receive_some(incoming_.rest()));
    if (got == 0) return has_moved;
    has_moved = true;
    incoming_.move(got);
  }
}

void QuestionStream::expect_head() {
  is_head_ = true;
  incoming_.begin({std::as_writable_bytes(std::span<MessageHead, 1>(&head_, 1))});
}

/// Checks the head that was received, and prepares the memory for its payload.
absl::Status QuestionStream::begin_answer() {
  if (head_.magic != MessageHead::kMagic || head_.bytes < 0 || sent_.empty()) return strange_answer();
  is_head_ = false;
  if (head_.kind == MessageKind::kRefused) {
    if (head_.bytes > kMostText) return strange_answer();
    text_.assign(static_cast<std::size_t>(head_.bytes), '\0');
    incoming_.begin({std::as_writable_bytes(std::span(text_))});
    return absl::OkStatus();
  }
  std::int64_t wanted = 0;
  for (const auto& place : sent_.front()->answer) wanted += static_cast<std::int64_t>(place.size());
  incoming_.begin(sent_.front()->answer);
  const bool is_known = head_.kind == MessageKind::kDone || head_.kind == MessageKind::kBusy;
  return is_known && head_.bytes == wanted ? absl::OkStatus() : strange_answer();
}

void QuestionStream::end_answer() {
  const Ticket question = sent_.front();
  sent_.pop_front();
  question->reply = head_;
  absl::Status status;
  if (head_.kind == MessageKind::kRefused)
    status = make_error(static_cast<ExitCode>(head_.first), server_ + ": " + text_);
  expect_head();
  end_(question, std::move(status));
}

absl::Status QuestionStream::ask_now(const Ticket& question, ServerLink& link, ServerLink::Limit limit) {
  expect_head();
  sent_.push_front(question);
  absl::Status status = exchange(question, link, limit);
  if (question->is_over) return absl::OkStatus();  // a refusal may end the connection
  std::erase(sent_, question);
  return status;
}

absl::Status QuestionStream::exchange(const Ticket& question, ServerLink& link, ServerLink::Limit limit) {
  TESSERA_RETURN_IF_ERROR(link.send(bytes_of(question->head), limit, /*more=*/question->head.bytes > 0));
  for (const auto& part : question->rest) TESSERA_RETURN_IF_ERROR(link.send(part, limit));
  while (!question->is_over) {
    TESSERA_ASSIGN_OR_RETURN(const bool has_received, receive_some(link));
    if (!has_received) TESSERA_RETURN_IF_ERROR(link.wait_to_receive(limit));
  }
  return absl::OkStatus();
}

std::vector<QuestionStream::Ticket> QuestionStream::take_all() {
  expect_head();
  std::vector<Ticket> all(sent_.begin(), sent_.end());
  if (sending_) all.push_back(std::exchange(sending_, nullptr));
  sent_.clear();
  return all;
}

}  // namespace tessera
