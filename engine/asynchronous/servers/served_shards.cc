#include "engine/asynchronous/servers/served_shards.h"

#include <absl/strings/str_split.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "engine/asynchronous/servers/served_definition.h"
#include "engine/asynchronous/servers/served_job.h"
#include "engine/memory/state_views.h"
#include "engine/step/agree/step_agreement.h"
#include "runtime/base/log.h"
#include "runtime/base/rank_name.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "tessera/error.h"
#include "tessera/span.h"

namespace tessera {

// This file communicates with the parameter servers.
//
// `ask` gives a question to a server's courier, and `hear` waits for that server's oldest answer: answers come in the
// order of questions. `pull_unit` asks for a unit's shards (`ask_for_copies`) and for the shards of the unit that comes
// next, and takes this unit's shards (`take_copies`). `reduced` sends gradients ahead. `push` then tells the servers to
// apply them, or sends those that were not sent ahead (`send_push`). `wait_for_slowest` and `wait_for_turn_of_round`
// bound staleness; they ask server 0. `write_values`, `fetch_states` and `bring_together` serve first values and
// checkpoints, while no rank pushes.

namespace {

using std::chrono::milliseconds;

/// A server waits no longer than comm.timeout_s for a worker, and then answers which worker is missing. So this rank
/// waits a little longer for the server's answer.
constexpr milliseconds kGrace{10'000};

/// The data about a step that a rank sends to the other ranks of its replica. The rank's flags of used parameters
/// follow this struct.
struct ToldInReplica {
  double loss = 0, weight = 0;
  std::int64_t tokens = 0, samples = 0;
  std::uint64_t numbers = 0;  ///< digest_of_numbers
};

milliseconds from_seconds(double s) { return milliseconds(static_cast<std::int64_t>(s * 1000)); }

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  if (value != nullptr && std::string_view(value).find_first_not_of(',') != std::string_view::npos) return value;
  throw Error(ExitCode::kConfig,
              std::string("/sync/owners: \"servers\" needs the variable ") + name +
                  ". [T0970] hint: start ranks by `tessera launch --servers 2`, or start `tessera serve` and "
                  "set TESSERA_SERVERS (HOST:PORT,HOST:PORT) and TESSERA_SERVERS_SECRET");
}

template <class T>
std::span<const std::byte> part_of(const T* values, std::int64_t offset, std::int64_t numel) {
  return std::as_bytes(std::span(values + offset, static_cast<std::size_t>(numel)));
}

}  // namespace

ServedShards::ServedShards(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, PeerBoard& board,
                           HostCopies& copies, const Strategy& strategy, std::shared_ptr<Collectives> replica)
    : PulledParameters(units, board, plan.update().outer.asynchronous, copies),
      replica_(std::move(replica)),
      piece_(replica_ ? replica_->rank() : 0),
      pieces_(replica_ ? replica_->size() : 1),
      limit_(from_seconds(strategy.comm.timeout_s) + kGrace),
      // Values may arrive before their unit is read. The check of values would report them as writes of the program.
      pulls_ahead_(!strategy.check.values) {
  const std::vector<std::string> addresses = absl::StrSplit(variable("TESSERA_SERVERS"), ',', absl::SkipEmpty());
  for (const std::string& address : addresses)
    servers_.push_back({address, "server " + std::to_string(servers_.size()) + " (" + address + ")", nullptr, {}});
  memory_ = Arena::plain("states for checkpoints", plan.passes().outer.shard_bytes);
  std::vector<ServedCut::Group> sizes;
  for_each_trainable(units, [&](const FlatGroup& flat) {
    sizes.push_back({flat.layout.numel(), plan.has_whole_shard(flat.shape())});
  });
  cut_ = ServedCut(std::move(sizes), servers(), pieces_);
  std::size_t parameters = 0;
  for_each_trainable(units, [&](FlatGroup& flat) {
    const std::size_t index = groups_.size();
    Group& added = groups_.emplace_back();
    added.flat = &flat;
    added.pulled.resize(servers_.size());
    added.counts.resize(flat.parameters.size());
    added.first_parameter = parameters;
    parameters += flat.parameters.size();
    for (int server = 0; server < servers(); ++server) {
      for (int piece = 0; piece < pieces_; ++piece) added.shards.push_back(cut_.shard(index, server, piece));
      order_.add_shard({flat.unit->name, flat.index, server});
    }
    place(flat, plan);
  });
  is_staged_.resize(groups_.size());
  memory_.expect_full();
  connect(strategy);
  expect_common_file();
  throw_if_error(order_.open(config_, {board.size(), "servers", servers()}, board.rank(), [&] { adopt(); }));
  if (order_.is_played()) next_turns_.resize(order_.shards());
}

/// Takes memory for the states of this rank's part of a group.
void ServedShards::place(FlatGroup& group, const MemoryPlan& plan) {
  const StateFormats& formats = plan.states_of(group.shape());
  for (std::size_t i = 0; i < formats.size(); ++i)
    group.state[i].data = memory_.take(state_piece(formats[i], group.optimizer_part.numel).data_bytes);
  if (group.of_tensors.part.numel > 0)
    group.of_tensors.data = reinterpret_cast<float*>(memory_.take(group.of_tensors.part.numel * 4));
}

std::span<const std::byte> ServedShards::gradients_of(const FlatGroup& flat, Extent part) const {
  return part_of(copies_.gradient(flat), part.offset - flat.gradient_part.offset, part.numel);
}

void ServedShards::expect_common_file() const {
  const bool has_order = !config_.record_order.empty() || !config_.play_order.empty();
  if (has_order && board_.size() > 1 && !board_.group().shares_memory())
    throw Error(ExitCode::kConfig,
                "/sync/record_order: ranks on several hosts have no file together, so no order is recorded or played "
                "there. [T0971] hint: record and play orders with all ranks on one host");
}

void ServedShards::connect(const Strategy& strategy) {
  if (config_.elastic && board_.size() != 1)
    throw Error(
        ExitCode::kConfig,
        "/sync/elastic: each worker that comes and goes is a job of one rank, and this job has " +
            std::to_string(board_.size()) +
            ". [T1005] hint: start workers by `tessera launch --workers 1:8 --servers 1`, or each without a launcher");
  if (!config_.elastic && std::getenv("TESSERA_WORKER") != nullptr)
    throw Error(ExitCode::kConfig,
                "/sync/elastic: the launcher starts workers that come and go (TESSERA_WORKER), and the strategy has "
                "ranks that stay. [T1006] hint: set \"elastic\": true in \"sync\", or start ranks by -n");
  const std::string secret = variable("TESSERA_SERVERS_SECRET");
  std::array<char, ServedJob::kRunName> run{};
  std::random_device random;
  if (config_.elastic) {
    run.fill('-');  // all workers of elastic servers belong to one run
  } else if (board_.rank() == 0) {
    std::ranges::copy(random_word(run.size()), run.begin());
  }
  throw_if_error(board_.group().broadcast("a run's name", run.data(), run.size(), 0).wait());
  const auto life = static_cast<std::int64_t>(((std::uint64_t{random()} << 31) ^ random()) >> 1) + 1;
  for (int server = 0; server < servers(); ++server) {
    Server& there = servers_[static_cast<std::size_t>(server)];
    there.courier = std::make_unique<ServerCourier>(
        ServerCourier::Visit{.address = there.address,
                             .name = there.name,
                             .secret = secret,
                             .definition = definition_for(server, std::string(run.data(), run.size()), strategy),
                             .shards = groups_.size() * static_cast<std::size_t>(pieces_),
                             .rank = config_.elastic ? worker_.number() : board_.rank(),
                             .life = life,
                             .limit = limit_,
                             // A run that records or replays an order must not lose pushes.
                             .may_wait = config_.record_order.empty() && config_.play_order.empty()});
    // Each server has the whole time, counted from the moment at which it is asked, since server 0 may have used it up.
    join(server, ServerLink::Clock::now() + from_seconds(strategy.comm.init_timeout_s));
  }
}

/// A server is busy while workers of the previous run are leaving. Server 0 of an elastic run is also busy until its
/// first worker has begun, which may take as long as reading a large file of weights.
void ServedShards::join(int server, ServerLink::Clock::time_point deadline) {
  const Server& there = servers_[static_cast<std::size_t>(server)];
  const auto busy_until = config_.elastic ? ServerLink::Clock::now() + limit_ : deadline;
  const auto joined = there.courier->start(deadline, busy_until);
  // A refusal with this code that comes before `busy_until` has another reason. An example is a server whose folder
  // another server uses.
  if (config_.elastic && exit_code_of(joined.status()) == ExitCode::kUnavailable &&
      ServerLink::Clock::now() > busy_until)
    throw Error(
        ExitCode::kPeerLost,
        there.name +
            ": timed out waiting for the first worker of the run, which has not begun (comm.timeout_s sets "
            "the limit), or the server serves another run. [T1007] hint: look for what stops that worker, or start "
            "servers of this run's own");
  if (!joined.ok()) throw Error(exit_code_of(joined.status()), self() + ": " + message_of(joined.status()));
  if (config_.elastic && server == 0) worker_.join(*joined);
}

std::string ServedShards::definition_for(int server, const std::string& run, const Strategy& strategy) const {
  using nlohmann::json;
  json all = {{"ranks", board_.size()},         {"server", server},
              {"servers", servers()},           {"timeout_s", strategy.comm.timeout_s},
              {"strategy", strategy.to_json()}, {"groups", json::array()}};
  for (const Group& group : groups_) all["groups"].push_back(describe_group(*group.flat));
  return run + all.dump();
}

std::int64_t ServedShards::returns() const {
  std::int64_t all = 0;
  for (const Server& server : servers_) all += server.courier->returns();
  return all;
}

std::string ServedShards::self() const {
  if (config_.elastic) return worker_.name();
  return rank_name(board_.rank(), board_.size());
}

void ServedShards::tell_all(MessageKind kind, const char* operation) {
  for (int server = servers() - 1; server >= 0; --server) answer_to({.head = {.kind = kind}}, server, operation);
}

/// Server 0 decides which worker gives the values. Server 0 is told last, when all servers have the values.
void ServedShards::begin() {
  if (!config_.elastic || !worker_.begin()) return;
  if (worker_.gives_values()) tell_all(MessageKind::kBegin, "start");
}

std::optional<std::int64_t> ServedShards::steps_of_all() const {
  return config_.elastic ? std::optional(newest_) : std::nullopt;
}

std::optional<std::int64_t> ServedShards::take_step(std::int64_t steps, std::int64_t data_order) {
  begin();
  settle();
  worker_.know_data();
  const auto deadline = ServerLink::Clock::now() + limit_;
  for (milliseconds pause(5);; pause = std::min(2 * pause, milliseconds(200))) {
    const MessageHead reply =
        answer_to({.head = {.kind = MessageKind::kTake, .first = steps, .second = worker_.taken(), .turn = data_order}},
                  0, "data");
    if (reply.kind == MessageKind::kDone) {
      const std::optional<std::int64_t> dealt = worker_.take(reply);
      if (worker_.is_over()) copy(0, groups_.size(), MessageKind::kCopy);  // no worker pushes any more
      return dealt;
    }
    if (ServerLink::Clock::now() > deadline)
      throw Error(ExitCode::kPeerLost,
                  self() +
                      " data: timed out waiting for the steps that other workers have not made (comm.timeout_s "
                      "sets the limit). [T1008] hint: look for what stops the other workers");
    std::this_thread::sleep_for(pause);
  }
}

void ServedShards::end_results() {
  try {
    settle();
  } catch (const Error&) {
    // Nobody needs the values that a lost server has not sent. Only server 0 has to know that the results are written.
  }
  answer_to({.head = {.kind = MessageKind::kEndResults}}, 0, "results");
}

Extent ServedShards::shard_at(const Group& group, int server, int piece) const {
  return group.shards[static_cast<std::size_t>(server * pieces_ + piece)];
}

std::uint32_t ServedShards::number_of(std::size_t group, int piece) const {
  return static_cast<std::uint32_t>(group) * static_cast<std::uint32_t>(pieces_) + static_cast<std::uint32_t>(piece);
}

template <class Visit>
void ServedShards::for_each_shard(const Group& group, Pieces pieces, const Visit& visit) const {
  for (int server = 0; server < servers(); ++server) {
    for (int piece = 0; piece < pieces_; ++piece) {
      if (pieces == Pieces::kOwn && piece != piece_) continue;
      const Extent shard = shard_at(group, server, piece);
      if (shard.numel > 0) visit(server, piece, shard);
    }
  }
}

std::size_t ServedShards::shard_of(std::size_t group, int server) const {
  return group * servers_.size() + static_cast<std::size_t>(server);
}

std::span<std::int64_t> ServedShards::counts(const FlatGroup& group) {
  return std::ranges::find(groups_, &group, &Group::flat)->counts;
}

void ServedShards::ask(int server, ServerQuestion question) {
  Server& there = servers_[static_cast<std::size_t>(server)];
  question.head.clock = clock_;
  there.asked.push_back(there.courier->send(std::move(question)));
}

void ServedShards::tell(int server, ServerQuestion message) {
  message.head.clock = clock_;
  servers_[static_cast<std::size_t>(server)].courier->send(std::move(message));
}

MessageHead ServedShards::hear(int server, const char* operation) {
  Server& there = servers_[static_cast<std::size_t>(server)];
  TORCH_INTERNAL_ASSERT(!there.asked.empty(), there.name, ": an answer to no question");
  const ServerCourier::Ticket ticket = there.asked.front();
  there.asked.pop_front();
  there.courier->wait(ticket);
  if (!ticket->status.ok()) {
    // No call will wait for the answers that are left. They are dropped, so that the next question's answer is again
    // the oldest one.
    for (Server& each : servers_) each.asked.clear();
    ahead_.reset();
    throw Error(exit_code_of(ticket->status), self() + " " + operation + ": " + message_of(ticket->status));
  }
  clock_ = std::max(clock_, ticket->reply.clock);
  return ticket->reply;
}

MessageHead ServedShards::answer_to(ServerQuestion question, int server, const char* operation) {
  ask(server, std::move(question));
  return hear(server, operation);
}

std::int64_t ServedShards::next_turn(std::size_t group, int server, bool is_push) {
  if (!order_.is_played()) return MessageHead::kNoTurn;
  const std::size_t index = shard_of(group, server);
  const std::vector<ShardTurn>& turns = order_.turns(index);
  std::size_t& next = next_turns_[index];
  while (next < turns.size() && turns[next].rank != board_.rank()) ++next;
  const std::string operation =
      order_.name(index).unit + (is_push ? " push" : " pull") + " of shard " + std::to_string(server);
  if (next == turns.size()) {
    if (is_push) throw_if_error(end_of_turns(operation, board_.rank()));
    return static_cast<std::int64_t>(next);  // the server waits until all turns have been taken
  }
  throw_if_error(expect_turn(turns[next], is_push, operation));
  return static_cast<std::int64_t>(next++);
}

/// Each server counts events separately. Each number is larger than all numbers that the asking worker has seen. So the
/// numbers give the order of the events of one shard, and of the events of one rank at one server.
void ServedShards::note(std::size_t group, int server, bool is_push, const MessageHead& reply) {
  newest_ = std::max(newest_, reply.first + (is_push ? 1 : 0));
  if (!order_.is_recorded()) return;
  order_.add({.number = reply.clock * servers() + server,
              .step = step(),
              .shard = shard_of(group, server),
              .version = reply.first,
              .rank = board_.rank(),
              .is_push = is_push});
}

void ServedShards::copy(std::size_t first, std::size_t last, MessageKind kind) {
  for (std::size_t i = first; i < last; ++i) ask_for_copies(i, kind);
  for (std::size_t i = first; i < last; ++i) take_copies(i, kind);
}

void ServedShards::ask_for_copies(std::size_t index, MessageKind kind) {
  const Group& group = groups_[index];
  copies_.open(*group.flat);
  for_each_shard(group, kind == MessageKind::kPull ? Pieces::kOwn : Pieces::kAll,
                 [&](int server, int piece, Extent shard) {
                   ServerQuestion question{.head = {.kind = kind, .shard = number_of(index, piece)}};
                   if (kind == MessageKind::kPull) question.head.turn = next_turn(index, server, /*is_push=*/false);
                   question.answer.emplace_back(copies_.values(*group.flat) + shard.offset * 4,
                                                static_cast<std::size_t>(shard.numel) * 4);
                   ask(server, std::move(question));
                 });
}

void ServedShards::take_copies(std::size_t index, MessageKind kind) {
  const bool is_pull = kind == MessageKind::kPull;
  Group& group = groups_[index];
  for_each_shard(group, is_pull ? Pieces::kOwn : Pieces::kAll, [&](int server, int piece, Extent) {
    const MessageHead reply = hear(server, is_pull ? "pull" : "copy");
    if (piece == piece_) group.pulled[static_cast<std::size_t>(server)] = reply.first;
    if (is_pull) note(index, server, /*is_push=*/false, reply);
  });
  if (is_pull) gather(index);
  copies_.send(*group.flat);
}

void ServedShards::gather(std::size_t index) {
  if (!replica_) return;
  const FlatGroup& group = *groups_[index].flat;
  if (cut_.is_whole(index)) {
    const auto bytes = static_cast<std::size_t>(group.layout.numel()) * 4;
    throw_if_error(replica_->broadcast(group.unit->name, values_of(group), bytes, cut_.piece_of(index)).wait());
    return;
  }
  const Extent own = replica_part(group.layout.numel(), piece_, pieces_);
  throw_if_error(replica_
                     ->all_gather(group.unit->name, values_of(group) + own.offset, values_of(group),
                                  static_cast<std::size_t>(own.numel) * 4)
                     .wait());
}

void ServedShards::ask_for_unit(std::size_t unit) {
  for (std::size_t i = first_group_[unit]; i < first_group_[unit + 1]; ++i) ask_for_copies(i, MessageKind::kPull);
}

void ServedShards::take_unit(std::size_t unit) {
  for (std::size_t i = first_group_[unit]; i < first_group_[unit + 1]; ++i) take_copies(i, MessageKind::kPull);
}

/// Waits for a unit that was asked for ahead of its first read. Answers come in the order of questions, so no other
/// answer may be taken before this unit's answer.
void ServedShards::settle() {
  if (const auto unit = std::exchange(ahead_, std::nullopt)) {
    take_unit(*unit);
    take_as_fresh(*unit);
  }
}

/// The function also asks for the next unit in the order of the previous step, so that the next unit's values arrive
/// while this unit computes.
void ServedShards::pull_unit(const Unit& unit) {
  begin();
  const auto index = static_cast<std::size_t>(unit.index);
  const bool is_coming = ahead_ == index;
  if (is_coming) {
    ahead_.reset();
  } else {
    settle();
    wait_for_slowest();
    ask_for_unit(index);
  }
  units_in_turn_.add(index);
  if (const auto next = units_in_turn_.after(index); pulls_ahead_ && next && !is_fresh(*next)) {
    ask_for_unit(*next);
    ahead_ = next;
  }
  take_unit(index);
}

/// It is called before each pull that was not asked for ahead, and waits only in the first call of a step. A worker for
/// which the others did not wait (it was loading, or had no step to make) continues with the count of the slowest
/// worker.
void ServedShards::wait_for_slowest() {
  if (!bounds_staleness() || waited_for_ == step()) return;
  const std::int64_t least = step() - 1 - *config_.max_staleness;
  const MessageHead reply = answer_to({.head = {.kind = MessageKind::kAwaitSlowest, .first = least}}, 0, "pull");
  if (config_.elastic) board_.note_pushed(reply.second);
  waited_for_ = step();
}

/// Server 0 has the number of steps that each rank has made.
void ServedShards::tell_steps(std::int64_t computed, std::int64_t pushed) {
  tell(0, {.head = {.kind = MessageKind::kNote, .first = computed, .second = pushed}});
}

void ServedShards::wait_for_turn_of_round() {
  if (!bounds_staleness()) return;
  tell_steps(step(), step() - 1);
  if (*config_.max_staleness != 0) return;
  answer_to({.head = {.kind = MessageKind::kAwaitRound, .first = step()}}, 0, "push");
}

void ServedShards::end_step() {
  if (config_.elastic || bounds_staleness()) tell_steps(step(), step());
  forget_staged();
  units_in_turn_.end_step();
  end_step_of_copies();
}

void ServedShards::skip() {
  settle();
  begin();
  wait_for_turn_of_round();
  end_step();
}

/// If a program has dropped gradients that were sent before (Engine::zero_grad), they need not be sent again when a
/// connection has broken.
void ServedShards::begin_last_backward() { forget_staged(); }

void ServedShards::forget_staged() {
  for (const Server& server : servers_) server.courier->forget_staged();
  std::ranges::fill(is_staged_, char{0});
}

/// The loss is summed in rank order, as in StepAgreement. Gradients are summed in the tree that all transports use. So
/// a replica of all ranks gives the same bits as steps that all ranks make together.
void ServedShards::sum_over_replica(LocalStep& told, std::span<char> used) {
  if (!replica_) return;
  const Span span("push", {}, &push_wait_seconds_);
  for (const Group& group : groups_) {
    const FlatGroup& flat = *group.flat;
    throw_if_error(replica_
                       ->all_reduce(flat.unit->name, copies_.gradient(flat), DType::kF32, copies_.gradient(flat),
                                    static_cast<std::size_t>(flat.gradient_part.numel))
                       .wait());
  }
  const ToldInReplica own{told.loss, told.weight, told.tokens, told.samples,
                          digest_of_numbers(told.rates, told.options)};
  std::vector<std::byte> message((sizeof own + used.size() + 7) / 8 * 8);
  std::memcpy(message.data(), &own, sizeof own);
  if (!used.empty()) std::memcpy(message.data() + sizeof own, used.data(), used.size());
  std::vector<std::byte> all(message.size() * static_cast<std::size_t>(pieces_));
  throw_if_error(replica_->all_gather("step", message.data(), all.data(), message.size()).wait());
  told.loss = told.weight = 0;
  told.tokens = told.samples = 0;
  for (int rank = 0; rank < pieces_; ++rank) {
    const std::byte* const theirs = all.data() + message.size() * static_cast<std::size_t>(rank);
    ToldInReplica each;
    std::memcpy(&each, theirs, sizeof each);
    if (each.numbers != own.numbers)
      throw Error(ExitCode::kUsage,
                  self() +
                      ": ranks of one replica have different learning rates or options. [T1052] hint: all "
                      "ranks of a replica call set_lr and set_option alike");
    told.loss += each.loss / pieces_;
    told.weight += each.weight;
    told.tokens += each.tokens;
    told.samples += each.samples;
    for (std::size_t i = 0; i < used.size(); ++i) used[i] |= static_cast<char>(theirs[sizeof each + i]);
  }
}

/// Sends a unit's gradients. The servers keep them until `push` says whether to apply them. If a replica has several
/// ranks, its gradients are summed first, when backward is over. Gradients of a GPU are still being copied to the host,
/// and backward does not wait for these copies. So `push` sends them.
void ServedShards::reduced(const Unit& unit) {
  if (replica_ || copies_.are_apart()) return;
  const auto number = static_cast<std::size_t>(unit.index);
  for (std::size_t i = first_group_[number]; i < first_group_[number + 1]; ++i) {
    const Group& group = groups_[i];
    for_each_shard(group, Pieces::kOwn, [&](int server, int piece, Extent shard) {
      tell(server, {.head = {.kind = MessageKind::kStage, .shard = number_of(i, piece)},
                    .rest = {gradients_of(*group.flat, shard)}});
    });
    is_staged_[i] = 1;
  }
}

/// Servers apply the gradients of a group while the numbers, or gradients, of the next groups are on their way.
GradientAges ServedShards::push(const ShardRule&, const PushRates& with) {
  const Span span("push", {}, &push_wait_seconds_);
  settle();
  begin();
  if (config_.elastic && !worker_.know_data())
    log_warning(
        "workers come and go, and the program has not asked which step's data it takes: each worker may take the same "
        "samples. [T1009] hint: before each step call Engine::take_step, and go to its data by "
        "TokenBatches::go_to_step, or "
        "take a StepSampler");
  wait_for_turn_of_round();
  GradientAges ages;
  std::vector<std::size_t> pushed;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const Group& group = groups_[i];
    const auto used = with.used.subspan(group.first_parameter, group.flat->parameters.size());
    if (std::ranges::find(used, char{1}) == used.end()) continue;
    send_push(i, {with.rates, used, with.learning_rates, with.options});
    pushed.push_back(i);
  }
  for (const std::size_t i : pushed) end_push(i, ages);
  end_step();
  return ages;
}

void ServedShards::send_push(std::size_t index, const PushRates& with) {
  const Group& group = groups_[index];
  const FlatGroup& flat = *group.flat;
  const bool sends_pulled = config_.delay_compensation.lambda != 0, is_staged = is_staged_[index] != 0;
  const PushedNumbers numbers{with.rates.gradient_scale, with.rates.clip_value, with.rates.lr,
                              with.rates.is_first_of_run ? 1 : 0};
  for_each_shard(group, Pieces::kOwn, [&](int server, int piece, Extent part) {
    ServerQuestion question{.head = {.kind = is_staged ? MessageKind::kApply : MessageKind::kPush,
                                     .shard = number_of(index, piece),
                                     .first = group.pulled[static_cast<std::size_t>(server)],
                                     .second = step(),
                                     .turn = next_turn(index, server, /*is_push=*/true)}};
    for (const auto& few :
         {bytes_of(numbers), std::as_bytes(with.learning_rates), std::as_bytes(with.options), std::as_bytes(with.used)})
      question.front.insert(question.front.end(), few.begin(), few.end());
    if (!is_staged) question.rest.push_back(gradients_of(flat, part));
    if (sends_pulled) question.rest.push_back(part_of(values_of(flat), part.offset, part.numel));
    ask(server, std::move(question));
  });
}

void ServedShards::end_push(std::size_t index, GradientAges& ages) {
  const Group& group = groups_[index];
  for_each_shard(group, Pieces::kOwn, [&](int server, int, Extent) {
    const MessageHead reply = hear(server, "push");
    // A server that has come back may have a version that is older than the pulled version.
    ages.add(std::max<std::int64_t>(0, reply.first - group.pulled[static_cast<std::size_t>(server)]));
    note(index, server, /*is_push=*/true, reply);
  });
}

void ServedShards::adopt() {
  settle();
  if (worker_.has_begun())
    throw Error(ExitCode::kUsage,
                self() +
                    ": parameters were written after training has begun, and other workers train them (\"sync\" "
                    "elastic). [T1010] hint: load and write values before the first step");
  if (worker_.gives_values()) write_values();
  board_.meet("asynchronous values");
  copy(0, groups_.size(), MessageKind::kCopy);
  board_.meet("asynchronous values");
}

/// Calls `visit(server, question)` if this rank's part has states of whole tensors. The question is about all of these,
/// and goes to the server that owns the group; its kind is not set.
template <class Visit>
void ServedShards::for_each_tensor_run(std::size_t index, const Visit& visit) const {
  const Group& group = groups_[index];
  const Extent own = group.flat->of_tensors.part;
  if (own.numel == 0) return;
  for_each_shard(group, Pieces::kAll, [&](int server, int piece, Extent) {
    visit(server, {.head = {.shard = number_of(index, piece), .first = own.offset, .second = own.numel}});
  });
}

/// Each rank gives the servers the values and states of its part.
void ServedShards::write_values() {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const FlatGroup& flat = *groups_[i].flat;
    copies_.bring(flat, flat.optimizer_part);
    for_each_shard(groups_[i], Pieces::kAll, [&](int server, int piece, Extent shard) {
      const Extent run = intersect(flat.optimizer_part, shard);
      if (run.numel == 0) return;
      ServerQuestion values{
          .head = {.kind = MessageKind::kWrite, .shard = number_of(i, piece), .first = run.offset, .second = run.numel},
          .rest = {part_of(values_of(flat), run.offset, run.numel)}};
      for (const FlatGroup::State& state : flat.state)
        if (state.data)
          values.rest.push_back(
              part_of(reinterpret_cast<const float*>(state.data), run.offset - flat.optimizer_part.offset, run.numel));
      answer_to(std::move(values), server, "first values");
    });
    for_each_tensor_run(i, [&](int server, ServerQuestion question) {
      question.head.kind = MessageKind::kWriteTensorStates;
      question.rest.push_back(part_of(flat.of_tensors.data, 0, flat.of_tensors.part.numel));
      answer_to(std::move(question), server, "first values");
    });
  }
}

void ServedShards::bring_together() {
  settle();
  board_.meet("asynchronous ranks come together");
  std::int64_t returns_before = 0;
  do {  // again if a server came back: it no longer holds back pushes, and may have lost pushes
    returns_before = returns();
    // Workers of an elastic run do not wait for each other, so this worker lets the servers hold back the pushes of the
    // others.
    if (config_.elastic) tell_all(MessageKind::kHold, "states");
    for (std::size_t unit = 0; unit + 1 < first_group_.size(); ++unit) {
      take_as_fresh(unit);
      copy(first_group_[unit], first_group_[unit + 1], MessageKind::kPull);
    }
    fetch_states();
  } while (config_.elastic && returns() != returns_before);
  if (config_.elastic) tell_all(MessageKind::kRelease, "states");
  board_.meet("asynchronous ranks come together");
}

/// Fetches the states and counts of this rank's part. No rank pushes during this call.
void ServedShards::fetch_states() {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    Group& group = groups_[i];
    const FlatGroup& flat = *group.flat;
    for_each_shard(group, Pieces::kAll, [&](int server, int piece, Extent shard) {
      const Extent run = intersect(flat.optimizer_part, shard);
      if (run.numel == 0) return;
      ServerQuestion question{.head = {.kind = MessageKind::kReadStates,
                                       .shard = number_of(i, piece),
                                       .first = run.offset,
                                       .second = run.numel}};
      const std::int64_t begin = 4 * (run.offset - flat.optimizer_part.offset);
      for (const FlatGroup::State& state : flat.state)
        if (state.data) question.answer.emplace_back(state.data + begin, static_cast<std::size_t>(run.numel) * 4);
      answer_to(std::move(question), server, "states");
    });
    for_each_tensor_run(i, [&](int server, ServerQuestion question) {
      question.head.kind = MessageKind::kReadTensorStates;
      question.answer.push_back(std::as_writable_bytes(
          std::span(flat.of_tensors.data, static_cast<std::size_t>(flat.of_tensors.part.numel))));
      answer_to(std::move(question), server, "states");
    });
    // All pushes have ended, so shards of a group have equal counts, and the last one is asked for them.
    int last_server = 0, last_piece = 0;
    for_each_shard(group, Pieces::kAll, [&](int server, int piece, Extent) {
      last_server = server;
      last_piece = piece;
    });
    answer_to({.head = {.kind = MessageKind::kReadCounts, .shard = number_of(i, last_piece)},
               .answer = {std::as_writable_bytes(std::span(group.counts))}},
              last_server, "counts");
  }
}

void ServedShards::share_counts() {
  const bool writes = board_.rank() == 0 && worker_.gives_values() && !worker_.has_begun();
  for (std::size_t i = 0; i < groups_.size() && writes; ++i) {
    for_each_shard(groups_[i], Pieces::kAll, [&](int server, int piece, Extent) {
      answer_to({.head = {.kind = MessageKind::kWriteCounts, .shard = number_of(i, piece)},
                 .rest = {std::as_bytes(std::span(groups_[i].counts))}},
                server, "counts");
    });
  }
  board_.meet("counts of steps");
}

void ServedShards::take_newest() {
  settle();
  if (!worker_.is_over()) copy(0, groups_.size(), MessageKind::kCopy);
}

}  // namespace tessera
