#include "engine/asynchronous/servers/server_courier.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"

namespace tessera {

// Two threads run the code of this file.
//
// The worker's thread queues questions (`send`) and waits until they are over (`wait`). The courier's own thread
// (`run`) moves bytes until the connection is lost (`move_bytes`), joins the server again (`come_back`), and queues
// again the questions without an answer (`send_again`). An eventfd wakes this thread when there is a new question, or
// when the courier is destroyed. No question is under way while a connection is made (`enter`, `join`), so `ask_now`
// simply asks and waits there.

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kBetweenTries{50}, kOneTry{1000}, kForNextServer{10'000};
constexpr int kMostVainReturns = 8;

bool pushes(MessageKind kind) { return kind == MessageKind::kPush || kind == MessageKind::kApply; }

bool has_version(MessageKind kind) { return kind == MessageKind::kPull || kind == MessageKind::kCopy || pushes(kind); }

/// Returns a ticket for the question, and sets the number of bytes of the payload in the question's head.
ServerCourier::Ticket ticket_for(ServerQuestion question) {
  const auto ticket = std::make_shared<ServerQuestion>(std::move(question));
  ticket->head.bytes = static_cast<std::int64_t>(ticket->front.size());
  for (const auto& part : ticket->rest) ticket->head.bytes += static_cast<std::int64_t>(part.size());
  return ticket;
}

milliseconds left_of(milliseconds limit, ServerCourier::Clock::time_point since) {
  return std::max(milliseconds(0), std::chrono::ceil<milliseconds>(since + limit - ServerCourier::Clock::now()));
}

}  // namespace

ServerCourier::ServerCourier(Visit visit)
    : visit_(std::move(visit)),
      number_(visit_.rank),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      under_way_(visit_.name, [this](const Ticket& over, absl::Status status) { finish(over, std::move(status)); }),
      versions_(visit_.shards) {}

ServerCourier::~ServerCourier() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
    if (link_) link_->shut();
  }
  wake();
  if (thread_.joinable()) thread_.join();
  if (wake_ >= 0) ::close(wake_);
}

void ServerCourier::wake() const {
  const std::uint64_t one = 1;
  // The write fails only if the eventfd's counter is full, and then the thread wakes anyway.
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
}

absl::StatusOr<MessageHead> ServerCourier::start(Clock::time_point deadline, Clock::time_point busy_until) {
  if (wake_ < 0) return make_error(ExitCode::kOsResource, "no descriptor to wake a thread: " + reason_of(errno));
  auto answer = enter(deadline, busy_until, /*returns=*/false);
  // The server may be killed while this worker joins, and be started again.
  const Clock::time_point until = std::min(deadline, Clock::now() + kForNextServer);
  while (exit_code_of(answer.status()) == ExitCode::kPeerLost && Clock::now() < until) {
    std::this_thread::sleep_for(kBetweenTries);
    answer = enter(until, busy_until, /*returns=*/false);
  }
  const std::string text = message_of(answer.status());
  if (exit_code_of(answer.status()) == ExitCode::kPeerLost && !text.starts_with(visit_.name))
    return make_error(ExitCode::kPeerLost, visit_.name + " is lost: " + text);
  if (answer.ok()) thread_ = std::jthread([this] { run(); });
  return answer;
}

/// Connects, sends the secret, and joins the run. `returns`: this worker was in the run before.
absl::StatusOr<MessageHead> ServerCourier::enter(Clock::time_point deadline, Clock::time_point busy_until,
                                                 bool returns) {
  auto made = ServerLink::connect(visit_.address, deadline);
  if (!made.ok() && exit_code_of(made.status()) == ExitCode::kConfig) return made.status();
  if (!made.ok()) return make_error(ExitCode::kPeerLost, visit_.name + ": " + message_of(made.status()));
  {
    const MutexLock lock(mutex_);
    if (is_ending_) return make_error(ExitCode::kPeerLost, "the worker ends. [T1012] hint: nothing is to be done");
    link_ = *std::move(made);
  }
  ServerQuestion secret{.head = {.kind = MessageKind::kSecret}, .rest = {std::as_bytes(std::span(visit_.secret))}};
  // A program that is no parameter server may listen at this address and send nothing. A server answers a little later
  // while connections that have not sent the secret fill all of its places. A server that was reached just before the
  // deadline gets a second for its answer.
  const auto left = std::max(std::chrono::duration_cast<milliseconds>(deadline - Clock::now()), milliseconds(1000));
  const absl::Status heard = ask_now(std::move(secret), returns ? visit_.limit : std::min(left, visit_.limit)).status();
  if (exit_code_of(heard) == ExitCode::kPeerLost)
    return make_error(
        ExitCode::kPeerLost,
        visit_.name +
            ": what listens there does not answer as a parameter server does. [T1066] hint: see whether another "
            "program has that port, or whether the server was stopped (comm.init_timeout_s is how long "
            "an answer is waited for)");
  TESSERA_RETURN_IF_ERROR(heard);
  return join(busy_until, returns);
}

/// A server is busy while workers of the previous run are leaving.
absl::StatusOr<MessageHead> ServerCourier::join(Clock::time_point busy_until, bool returns) {
  for (;;) {
    ServerQuestion question{
        .head = {.kind = MessageKind::kJoin, .first = number_, .second = returns ? -visit_.life : visit_.life},
        .rest = {std::as_bytes(std::span(visit_.definition))}};
    TESSERA_ASSIGN_OR_RETURN(const MessageHead answer, ask_now(std::move(question), visit_.limit));
    if (answer.kind == MessageKind::kDone) {
      comes_back_ = visit_.may_wait && answer.shard != 0;
      server_life_ = answer.clock;
      number_ = static_cast<int>(answer.first);
      return answer;
    }
    if (Clock::now() > busy_until)  // the server's thread of this worker's lost connection may still run
      return make_error(returns ? ExitCode::kPeerLost : ExitCode::kUnavailable,
                        visit_.name +
                            " still serves another run. [T0972] hint: end that run, or start servers of this run's "
                            "own");
    std::this_thread::sleep_for(kBetweenTries);
  }
}

absl::StatusOr<MessageHead> ServerCourier::ask_now(ServerQuestion question, ServerLink::Limit limit) {
  const Ticket ticket = ticket_for(std::move(question));
  TESSERA_RETURN_IF_ERROR(under_way_.ask_now(ticket, *link_, limit));
  TESSERA_RETURN_IF_ERROR(ticket->status);
  return ticket->reply;
}

ServerCourier::Ticket ServerCourier::send(ServerQuestion question) {
  const Ticket ticket = ticket_for(std::move(question));
  {
    const MutexLock lock(mutex_);
    if (!failure_.ok()) {
      ticket->status = failure_;
      ticket->is_over = true;
      return ticket;
    }
    queue_.push_back(ticket);
    if (ticket->head.kind == MessageKind::kNote) note_ = ticket->head;
  }
  wake();
  return ticket;
}

void ServerCourier::wait(const Ticket& ticket) {
  const MutexLock lock(mutex_);
  while (!ticket->is_over) changed_.wait(mutex_);
}

void ServerCourier::forget_staged() {
  const MutexLock lock(mutex_);
  staged_.clear();
}

/// Ends a question that was sent and answered, or that gets no answer.
void ServerCourier::finish(const Ticket& ticket, absl::Status status) {
  if (status.ok() && has_version(ticket->head.kind)) {
    std::int64_t& version = versions_[ticket->head.shard];
    version = std::max(version, ticket->reply.first + (pushes(ticket->head.kind) ? 1 : 0));
  }
  const MutexLock lock(mutex_);
  if (ticket->head.kind == MessageKind::kStage) staged_.push_back(ticket);
  ticket->status = std::move(status);
  ticket->is_over = true;
  changed_.notify_all();
}

void ServerCourier::fail_all(const absl::Status& why) {
  const MutexLock lock(mutex_);
  failure_ = why;
  const auto fail = [&](const Ticket& ticket) {
    ticket->status = why;
    ticket->is_over = true;
  };
  std::ranges::for_each(under_way_.take_all(), fail);
  std::ranges::for_each(queue_, fail);
  queue_.clear();
  staged_.clear();
  changed_.notify_all();
}

void ServerCourier::run() {
  set_log_rank(log_rank_);
  for (;;) {
    absl::Status status = move_bytes();
    if (status.ok()) return;  // the worker ends
    status = come_back(status);
    if (!status.ok()) return fail_all(status);
  }
}

/// Sends and receives until the worker ends. Returns the error of a connection that is lost.
absl::Status ServerCourier::move_bytes() {
  Clock::time_point moved = Clock::now();
  for (;;) {
    take_next();
    {
      const MutexLock lock(mutex_);
      if (is_ending_) return absl::OkStatus();
    }
    const bool is_idle = under_way_.is_idle();
    // When a server has come back, the other ranks wait until this rank has joined it. This rank may compute for a long
    // time, so the connection is watched while it computes.
    const bool is_watched = !is_idle || comes_back_;
    const auto events = static_cast<short>(under_way_.is_sending() ? POLLIN | POLLOUT : POLLIN);
    std::array<pollfd, 2> ready = {{{is_watched ? link_->socket() : -1, events, 0}, {wake_, POLLIN, 0}}};
    const int timeout = is_idle ? -1 : static_cast<int>(left_of(visit_.limit, moved).count());
    const int found = ::poll(ready.data(), ready.size(), timeout);
    if (found < 0 && errno != EINTR) return make_error(ExitCode::kOsResource, "poll: " + reason_of(errno));
    if (found == 0) {
      comes_back_ = false;  // the server runs, but does not answer
      return make_error(ExitCode::kPeerLost,
                        "no answer within " + std::to_string(visit_.limit.count() / 1000) +
                            " s. [T1013] hint: look for what stops that server, or raise comm.timeout_s");
    }
    std::uint64_t wakes = 0;
    [[maybe_unused]] const ssize_t got = ::read(wake_, &wakes, sizeof wakes);  // nothing can be read if no thread wrote
    if (is_idle) moved = Clock::now();
    if (is_idle && ready[0].revents == 0) continue;
    TESSERA_ASSIGN_OR_RETURN(const bool has_sent, send_some());
    const std::size_t unanswered = under_way_.unanswered();
    TESSERA_ASSIGN_OR_RETURN(const bool has_received, under_way_.receive_some(*link_));
    if (under_way_.unanswered() < unanswered) vain_returns_ = 0;
    if (has_sent || has_received) moved = Clock::now();
  }
}

/// Begins to send the next question, unless a question is being sent. Returns whether a question is being sent now.
bool ServerCourier::take_next() {
  if (under_way_.is_sending()) return true;
  const MutexLock lock(mutex_);
  if (queue_.empty()) return false;
  under_way_.begin(queue_.front());
  queue_.pop_front();
  return true;
}

/// Sends as many bytes as is possible without waiting. Returns whether any bytes were sent.
absl::StatusOr<bool> ServerCourier::send_some() {
  bool has_moved = false;
  while (take_next()) {
    TESSERA_ASSIGN_OR_RETURN(const bool has_sent, under_way_.send_some(*link_));
    has_moved = has_moved || has_sent;
    if (under_way_.is_sending()) break;
  }
  return has_moved;
}

/// Joins the run again, at the server that was lost. Returns an error if the server does not come back, or ends again
/// and again before it has answered a question.
absl::Status ServerCourier::come_back(const absl::Status& why) {
  if (!comes_back_ || ++vain_returns_ > kMostVainReturns)
    return make_error(exit_code_of(why), visit_.name + " is lost: " + message_of(why));
  log_warning(visit_.name + " is lost; this rank waits for it, for at most " +
              std::to_string(visit_.limit.count() / 1000) + " s");
  const Clock::time_point deadline = Clock::now() + visit_.limit;
  const std::int64_t life = server_life_;
  for (;;) {
    const Clock::time_point end = std::min(deadline, Clock::now() + kOneTry);
    absl::Status status = enter(end, end, /*returns=*/true).status();
    if (status.ok() && server_life_ != life) status = count_lost();
    if (status.ok()) break;
    const ExitCode code = exit_code_of(status);  // 64: the server's thread of the lost connection has not ended yet
    const bool may_change = code == ExitCode::kPeerLost || code == ExitCode::kUsage;
    bool is_ending = false;
    {
      const MutexLock lock(mutex_);
      is_ending = is_ending_;
    }
    if (is_ending || !may_change || Clock::now() > deadline)
      return make_error(code, visit_.name + " is lost, and has not come back: " + message_of(status));
    std::this_thread::sleep_for(kBetweenTries);
  }
  ++returns_;
  send_again();
  return absl::OkStatus();
}

/// Counts the pushes that this worker knew of and that were missing in the shards when the server came back.
absl::Status ServerCourier::count_lost() {
  std::vector<std::int64_t> now(versions_.size());
  ServerQuestion question{.head = {.kind = MessageKind::kReadVersions},
                          .answer = {std::as_writable_bytes(std::span(now))}};
  TESSERA_RETURN_IF_ERROR(ask_now(std::move(question), visit_.limit).status());
  std::int64_t lost = 0;
  for (std::size_t i = 0; i < now.size(); ++i) lost += std::max<std::int64_t>(0, versions_[i] - now[i]);
  versions_ = std::move(now);
  lost_pushes_ += lost;
  log_warning(visit_.name +
              " has come back; pushes to its shards that this rank knew of and that are lost: " + std::to_string(lost));
  return absl::OkStatus();
}

/// Queues again the messages that must be sent over a new connection: the number of steps that this rank has made, the
/// gradients of the step under way, and the questions without an answer, in the order in which they were asked.
void ServerCourier::send_again() {
  const std::vector<Ticket> begun = under_way_.take_all();
  const MutexLock lock(mutex_);
  std::deque<Ticket> all;
  if (note_) {
    all.push_back(std::make_shared<ServerQuestion>());
    all.back()->head = *note_;
  }
  all.insert(all.end(), staged_.begin(), staged_.end());
  all.insert(all.end(), begun.begin(), begun.end());
  all.insert(all.end(), queue_.begin(), queue_.end());
  queue_ = std::move(all);
  staged_.clear();  // each staged message is noted again when it is sent
}

}  // namespace tessera
