// Tests parts of the worker's side (the stream of questions, the order of units) and of the server's side (the thread
// that keeps shards).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <new>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "engine/asynchronous/servers/kept_shards.h"
#include "engine/asynchronous/servers/question_stream.h"
#include "engine/asynchronous/servers/served_shards.h"
#include "runtime/base/status.h"

namespace tessera {
namespace server_parts_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Ticket = QuestionStream::Ticket;
using namespace std::chrono_literals;

/// A worker's stream of questions, both ends of its connection to a server, and the questions that are over.
class Asked {
 public:
  Asked() {
    std::array<int, 2> sockets{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets.data()), 0);
    worker = std::make_unique<ServerLink>(sockets[0]);
    server = std::make_unique<ServerLink>(sockets[1]);
  }

  /// Sends a question whose answer goes to `answer`.
  Ticket send(MessageKind kind, std::span<std::byte> answer = {}) {
    const auto question = std::make_shared<ServerQuestion>();
    question->head.kind = kind;
    question->answer.push_back(answer);
    stream.begin(question);
    EXPECT_TRUE(stream.send_some(*worker).value());
    EXPECT_FALSE(stream.is_sending());
    EXPECT_EQ(server->receive_head(10s)->kind, kind);
    return question;
  }

  std::unique_ptr<ServerLink> worker, server;
  std::vector<Ticket> over;
  QuestionStream stream{"server 0", [this](const Ticket& question, absl::Status status) {
                          question->status = std::move(status);
                          question->is_over = true;
                          over.push_back(question);
                        }};
};

TEST(QuestionStream, EndsQuestionsInTheirOrderAndMessagesWhenTheyAreSent) {
  Asked asked;
  std::array<std::byte, 8> values{};
  const Ticket pull = asked.send(MessageKind::kPull, values), push = asked.send(MessageKind::kPush);
  const Ticket note = asked.send(MessageKind::kNote);
  EXPECT_THAT(asked.over, ElementsAre(note));
  EXPECT_EQ(asked.stream.unanswered(), 2u);
  EXPECT_FALSE(asked.stream.receive_some(*asked.worker).value());

  const std::array<std::byte, 8> sent{std::byte{1}, std::byte{2}};
  ASSERT_TRUE(asked.server->send({.first = 7}, sent, 10s).ok());
  ASSERT_TRUE(asked.server->refuse(ExitCode::kUsage, "too late", 10s).ok());
  EXPECT_TRUE(asked.stream.receive_some(*asked.worker).value());
  EXPECT_THAT(asked.over, ElementsAre(note, pull, push));
  EXPECT_TRUE(pull->status.ok());
  EXPECT_EQ(pull->reply.first, 7);
  EXPECT_EQ(values, sent);
  EXPECT_EQ(exit_code_of(push->status), ExitCode::kUsage);
  EXPECT_THAT(message_of(push->status), HasSubstr("server 0: too late"));
  EXPECT_TRUE(asked.stream.is_idle());
}

TEST(QuestionStream, GivesBackQuestionsAfterAnAnswerThatDoesNotFit) {
  Asked asked;
  std::array<std::byte, 8> values{};
  const Ticket pull = asked.send(MessageKind::kPull, values), push = asked.send(MessageKind::kPush);
  ASSERT_TRUE(asked.server->send({}, std::span(values).first(4), 10s).ok());
  EXPECT_THAT(message_of(asked.stream.receive_some(*asked.worker).status()), HasSubstr("does not fit its question"));
  EXPECT_THAT(asked.stream.take_all(), ElementsAre(pull, push));
  EXPECT_TRUE(asked.stream.is_idle());
  EXPECT_TRUE(asked.over.empty());
}

TEST(KeepingThread, KeepsOnceMoreAtItsEnd) {
  std::atomic<int> calls = 0, last_calls = 0;
  {
    const KeepingThread thread([&](bool is_last) {
      ++calls;
      if (is_last) ++last_calls;
      return absl::OkStatus();
    });
    EXPECT_TRUE(thread.failure().ok());
  }
  EXPECT_EQ(calls.load(), 1);
  EXPECT_EQ(last_calls.load(), 1);
}

TEST(KeepingThread, KeepsNothingAfterAFailure) {
  std::atomic<int> calls = 0;
  {
    KeepingThread thread([&](bool) -> absl::Status {
      ++calls;
      throw std::bad_alloc();
    });
    thread.wake();
    for (int i = 0; i < 10'000 && thread.failure().ok(); ++i) std::this_thread::sleep_for(1ms);
    EXPECT_THAT(message_of(thread.failure()), HasSubstr("a shard is not kept"));
  }
  EXPECT_EQ(calls.load(), 1);
}

TEST(UnitsInTurn, FollowThoseOfTheStepBefore) {
  UnitsInTurn units;
  units.add(2);
  units.add(0);
  EXPECT_FALSE(units.after(2).has_value()) << "no step was made before";
  units.end_step();
  EXPECT_EQ(units.after(2), 0u);
  EXPECT_FALSE(units.after(0).has_value()) << "it was the last one";
  EXPECT_FALSE(units.after(1).has_value()) << "it was not used";
  units.end_step();
  EXPECT_FALSE(units.after(2).has_value());
}

}  // namespace server_parts_test
}  // namespace tessera
