#include "engine/asynchronous/servers/served_shards.h"

#include <absl/strings/str_split.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>
#include <thread>
#include <utility>

#include "engine/asynchronous/servers/served_job.h"
#include "engine/asynchronous/servers/served_part.h"
#include "engine/memory/state_views.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "tessera/error.h"
#include "tessera/span.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

/// A server waits itself for no longer than comm.timeout_s, and then says for whom; so this end waits a little longer.
constexpr milliseconds kGrace{10'000};
constexpr std::size_t kCopiesAhead = 16;

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
                           const Strategy& strategy)
    : PulledParameters(units, board),
      config_(plan.update().outer.asynchronous),
      limit_(from_seconds(strategy.comm.timeout_s) + kGrace) {
  const std::vector<std::string> addresses = absl::StrSplit(variable("TESSERA_SERVERS"), ',', absl::SkipEmpty());
  for (const std::string& address : addresses)
    servers_.push_back({address, "server " + std::to_string(servers_.size()) + " (" + address + ")", nullptr});
  memory_ = Arena::plain("states for checkpoints", plan.use()[MemoryCategory::kOptimizer]);
  std::size_t parameters = 0;
  for_each_trainable(units, [&](FlatGroup& flat) {
    Group& added = groups_.emplace_back();
    added.flat = &flat;
    added.pulled.resize(servers_.size());
    added.counts.resize(flat.parameters.size());
    added.first_parameter = parameters;
    parameters += flat.parameters.size();
    for (int server = 0; server < servers(); ++server) {
      added.parts.push_back(served_part(flat.layout.numel(), server, servers()));
      names_.push_back({flat.unit->name, flat.index, server});
    }
    place(flat, plan);
  });
  memory_.expect_full();
  connect(strategy);
  open_orders();
  adopt();
  if (!config_.record_order.empty() && board.rank() != 0)
    writer_.emplace(value_or_throw(OrderWriter::open(config_.record_order, board.size(), /*is_first=*/false)));
}

/// Takes memory for the states of this rank's part of a group.
void ServedShards::place(FlatGroup& group, const MemoryPlan& plan) {
  const StateFormats& formats = plan.update().states;
  for (std::size_t i = 0; i < formats.size(); ++i)
    group.state[i].data = memory_.take(state_piece(formats[i], group.optimizer_part.numel).data_bytes);
}

void ServedShards::open_orders() {
  if (config_.record_order.empty() && config_.play_order.empty()) return;
  if (board_.size() > 1 && !board_.group().shares_memory())
    throw Error(ExitCode::kConfig,
                "/sync/record_order: ranks on several hosts have no file together, so no order is recorded or played "
                "there. [T0971] hint: record and play orders with all ranks on one host");
  if (!config_.play_order.empty()) {
    turns_ = value_or_throw(read_order(config_.play_order, board_.size(), names_));
    next_turns_.resize(turns_.size());
  }
  if (!config_.record_order.empty() && board_.rank() == 0)
    writer_.emplace(value_or_throw(OrderWriter::open(config_.record_order, board_.size(), /*is_first=*/true)));
}

void ServedShards::connect(const Strategy& strategy) {
  if (config_.elastic && board_.size() != 1)
    throw Error(ExitCode::kConfig,
                "/sync/elastic: each worker that comes and goes is a job of one rank, and this job has " +
                    std::to_string(board_.size()) +
                    ". hint: start workers by `tessera launch --workers 1:8 --servers 1`, or each without a launcher");
  if (!config_.elastic && std::getenv("TESSERA_WORKER") != nullptr)
    throw Error(ExitCode::kConfig,
                "/sync/elastic: the launcher starts workers that come and go (TESSERA_WORKER), and the strategy has "
                "ranks that stay. hint: set \"elastic\": true in \"sync\", or start ranks by -n");
  const std::string secret = variable("TESSERA_SERVERS_SECRET");
  std::array<char, ServedJob::kRunName> run{};
  if (config_.elastic) {
    run.fill('-');  // all workers of such servers belong to one run
  } else if (board_.rank() == 0) {
    std::random_device random;
    for (char& letter : run) letter = "0123456789abcdef"[random() % 16];
  }
  throw_if_error(board_.group().broadcast("a run's name", run.data(), run.size(), 0).wait());
  const auto deadline = ServerLink::Clock::now() + from_seconds(strategy.comm.init_timeout_s);
  for (int server = 0; server < servers(); ++server) {
    Server& there = servers_[static_cast<std::size_t>(server)];
    auto link = ServerLink::connect(there.address, deadline);
    if (!link.ok() && exit_code_of(link.status()) == ExitCode::kConfig) throw_if_error(link.status());
    if (!link.ok()) throw Error(ExitCode::kPeerLost, self() + ": " + there.name + ": " + message_of(link.status()));
    there.link = *std::move(link);
    MessageHead head;
    head.kind = MessageKind::kSecret;
    ask(server, head, {std::as_bytes(std::span(secret))}, "secret");
    hear(server, "secret");
    join(server, definition_for(server, std::string(run.data(), run.size()), strategy), deadline);
  }
}

/// A server is busy while workers of the run before are leaving, and server 0 of an elastic run while its first worker
/// has not begun, which may take as long as reading a large file of weights.
void ServedShards::join(int server, const std::string& definition, ServerLink::Clock::time_point deadline) {
  if (config_.elastic) deadline = ServerLink::Clock::now() + limit_;
  for (;;) {
    MessageHead head;
    head.kind = MessageKind::kJoin;
    head.first = config_.elastic ? number_ : board_.rank();
    ask(server, head, {std::as_bytes(std::span(definition))}, "start");
    const MessageHead reply = hear(server, "start");
    if (reply.kind == MessageKind::kDone && config_.elastic && server == 0) {
      number_ = static_cast<int>(reply.first);
      board_.note_pushed(reply.second);
      gives_values_ = reply.turn == 1;
    }
    if (reply.kind == MessageKind::kDone) return;
    if (ServerLink::Clock::now() > deadline && config_.elastic)
      throw Error(ExitCode::kPeerLost,
                  servers_[static_cast<std::size_t>(server)].name +
                      ": timed out waiting for the first worker of the run, which has not begun (comm.timeout_s sets "
                      "the limit), or the server serves another run. hint: look for what stops that worker, or start "
                      "servers of this run's own");
    if (ServerLink::Clock::now() > deadline)
      throw Error(ExitCode::kUnavailable,
                  servers_[static_cast<std::size_t>(server)].name +
                      " still serves another run. [T0972] hint: end that run, or start servers of "
                      "this run's own");
    std::this_thread::sleep_for(milliseconds(config_.elastic ? 200 : 50));
  }
}

std::string ServedShards::definition_for(int server, const std::string& run, const Strategy& strategy) const {
  using nlohmann::json;
  json all = {{"ranks", board_.size()},         {"server", server},
              {"servers", servers()},           {"timeout_s", strategy.comm.timeout_s},
              {"strategy", strategy.to_json()}, {"groups", json::array()}};
  for (const Group& group : groups_) {
    const FlatGroup& flat = *group.flat;
    std::vector<std::int64_t> numels, options;
    for (const FlatParameter& parameter : flat.parameters) {
      numels.push_back(parameter.numel);
      options.push_back(parameter.group == FlatParameter::kNoGroup ? -1 : static_cast<std::int64_t>(parameter.group));
    }
    TORCH_INTERNAL_ASSERT(Layout::pack(numels, flat.layout.parts()).numel() == flat.layout.numel(),
                          "a server would lay out unit ", flat.unit->name, " in another way");
    all["groups"].push_back({{"unit", flat.unit->name},
                             {"unit_index", flat.unit->index},
                             {"group", flat.index},
                             {"numels", numels},
                             {"parts", flat.layout.parts()},
                             {"options", options}});
  }
  return run + all.dump();
}

std::string ServedShards::self() const {
  if (config_.elastic) return number_ == JobMembers::kAnyNumber ? "a worker" : "worker " + std::to_string(number_);
  return "rank " + std::to_string(board_.rank()) + "/" + std::to_string(board_.size());
}

void ServedShards::tell_all(MessageKind kind, const char* operation) {
  for (int server = servers() - 1; server >= 0; --server) {
    MessageHead head;
    head.kind = kind;
    ask(server, head, {}, operation);
    hear(server, operation);
  }
}

/// Server 0, which says who gives values, hears it last: then all servers have them.
void ServedShards::begin() {
  if (!config_.elastic || std::exchange(has_begun_, true)) return;
  if (gives_values_) tell_all(MessageKind::kBegin, "start");
}

std::optional<std::int64_t> ServedShards::steps_of_all() const {
  return config_.elastic ? std::optional(newest_) : std::nullopt;
}

std::optional<std::int64_t> ServedShards::take_step(std::int64_t steps) {
  begin();
  knows_data_ = true;
  const auto deadline = ServerLink::Clock::now() + limit_;
  for (milliseconds pause(5);; pause = std::min(2 * pause, milliseconds(200))) {
    MessageHead head;
    head.kind = MessageKind::kTake;
    head.first = steps;
    ask(0, head, {}, "data");
    const MessageHead reply = hear(0, "data");
    if (reply.kind == MessageKind::kDone) {
      is_over_ = reply.first == MessageHead::kOver;
      finishes_ = is_over_ && reply.second == 1;
      if (is_over_) copy(0, groups_.size(), MessageKind::kCopy);  // nobody pushes any more
      if (reply.first < 0) return std::nullopt;
      board_.note_pushed(reply.second);
      return reply.first;
    }
    if (ServerLink::Clock::now() > deadline)
      throw Error(ExitCode::kPeerLost,
                  self() +
                      " data: timed out waiting for the steps that other workers have not made (comm.timeout_s "
                      "sets the limit). hint: look for what stops the other workers");
    std::this_thread::sleep_for(pause);
  }
}

std::size_t ServedShards::shard_of(std::size_t group, int server) const {
  return group * servers_.size() + static_cast<std::size_t>(server);
}

std::span<std::int64_t> ServedShards::counts(const FlatGroup& group) {
  return std::ranges::find(groups_, &group, &Group::flat)->counts;
}

void ServedShards::throw_lost(int server, const absl::Status& status, const char* operation) const {
  if (status.ok()) return;
  throw Error(ExitCode::kPeerLost, self() + " " + operation + ": " + servers_[static_cast<std::size_t>(server)].name +
                                       " is lost: " + message_of(status));
}

void ServedShards::ask(int server, MessageHead head, std::initializer_list<std::span<const std::byte>> payload,
                       const char* operation) {
  ServerLink& link = *servers_[static_cast<std::size_t>(server)].link;
  for (const auto& part : payload) head.bytes += static_cast<std::int64_t>(part.size());
  head.clock = clock_;
  throw_lost(server, link.send(bytes_of(head), limit_, /*more=*/head.bytes > 0), operation);
  for (const auto& part : payload) throw_lost(server, link.send(part, limit_), operation);
}

MessageHead ServedShards::hear(int server, const char* operation) {
  auto head = servers_[static_cast<std::size_t>(server)].link->receive_head(limit_);
  throw_lost(server, head.status(), operation);
  if (head->kind == MessageKind::kRefused) {
    std::string text_with_hint(static_cast<std::size_t>(std::min<std::int64_t>(head->bytes, 1 << 20)), '\0');
    take(server, std::as_writable_bytes(std::span(text_with_hint)), operation);
    throw Error(
        static_cast<ExitCode>(head->first),
        self() + " " + operation + ": " + servers_[static_cast<std::size_t>(server)].name + ": " + text_with_hint);
  }
  clock_ = std::max(clock_, head->clock);
  return *head;
}

void ServedShards::take(int server, std::span<std::byte> bytes, const char* operation) {
  throw_lost(server, servers_[static_cast<std::size_t>(server)].link->receive(bytes, limit_), operation);
}

std::int64_t ServedShards::next_turn(std::size_t group, int server, bool is_push) {
  if (turns_.empty()) return MessageHead::kNoTurn;
  const std::size_t index = shard_of(group, server);
  const std::vector<ShardTurn>& turns = turns_[index];
  std::size_t& next = next_turns_[index];
  while (next < turns.size() && turns[next].rank != board_.rank()) ++next;
  const std::string operation =
      names_[index].unit + (is_push ? " push" : " pull") + " of shard " + std::to_string(server);
  if (next == turns.size()) throw_if_error(end_of_turns(operation, board_.rank()));
  throw_if_error(expect_turn(turns[next], is_push, operation));
  return static_cast<std::int64_t>(next++);
}

/// Servers count events each for itself, above all that a worker has seen. So numbers order the events of a shard, and
/// those of a rank at one server.
void ServedShards::note(std::size_t group, int server, bool is_push, const MessageHead& reply) {
  newest_ = std::max(newest_, reply.first + (is_push ? 1 : 0));
  if (!writer_) return;
  const std::size_t index = shard_of(group, server);
  writer_->add({.number = reply.clock * servers() + server,
                .step = step(),
                .shard = index,
                .version = reply.first,
                .rank = board_.rank(),
                .is_push = is_push},
               names_[index]);
}

/// A server that cannot send an answer reads no question. So only a few are asked before their answers are read, which
/// sockets hold in any case.
void ServedShards::copy(std::size_t first, std::size_t last, MessageKind kind) {
  std::size_t asked = first;
  for (std::size_t i = first; i < last; ++i) {
    for (; asked < std::min(last, i + kCopiesAhead); ++asked) ask_for_copies(asked, kind);
    take_copies(i, kind);
  }
}

void ServedShards::ask_for_copies(std::size_t group, MessageKind kind) {
  const bool is_pull = kind == MessageKind::kPull;
  for (int server = 0; server < servers(); ++server) {
    if (groups_[group].parts[static_cast<std::size_t>(server)].numel == 0) continue;
    MessageHead head;
    head.kind = kind;
    head.shard = static_cast<std::uint32_t>(group);
    if (is_pull) head.turn = next_turn(group, server, /*is_push=*/false);
    ask(server, head, {}, is_pull ? "pull" : "copy");
  }
}

void ServedShards::take_copies(std::size_t index, MessageKind kind) {
  const bool is_pull = kind == MessageKind::kPull;
  const char* const operation = is_pull ? "pull" : "copy";
  Group& group = groups_[index];
  for (int server = 0; server < servers(); ++server) {
    const Extent part = group.parts[static_cast<std::size_t>(server)];
    if (part.numel == 0) continue;
    const MessageHead reply = hear(server, operation);
    take(server, {group.flat->full + part.offset * 4, static_cast<std::size_t>(part.numel) * 4}, operation);
    group.pulled[static_cast<std::size_t>(server)] = reply.first;
    if (is_pull) note(index, server, /*is_push=*/false, reply);
  }
}

void ServedShards::pull_unit(const Unit& unit) {
  begin();
  const auto index = static_cast<std::size_t>(unit.index);
  if (config_.max_staleness && turns_.empty()) {
    MessageHead head;
    head.kind = MessageKind::kAwaitSlowest;
    head.first = step() - 1 - *config_.max_staleness;
    ask(0, head, {}, "pull");
    hear(0, "pull");
  }
  copy(first_group_[index], first_group_[index + 1], MessageKind::kPull);
}

/// Server 0 knows how far each rank is. An order that is played already contains the effect of such waits.
void ServedShards::wait_for_turn_of_round() {
  if (!config_.max_staleness || !turns_.empty()) return;
  MessageHead head;
  head.kind = MessageKind::kNote;
  head.first = step();
  head.second = step() - 1;
  ask(0, head, {}, "push");
  if (*config_.max_staleness != 0) return;
  head.kind = MessageKind::kAwaitRound;
  ask(0, head, {}, "push");
  hear(0, "push");
}

void ServedShards::end_step() {
  if (config_.elastic || (config_.max_staleness && turns_.empty())) {
    MessageHead head;
    head.kind = MessageKind::kNote;
    head.first = head.second = step();
    ask(0, head, {}, "push");
  }
  end_step_of_copies();
  if (writer_) throw_if_error(writer_->write_if_many());
}

void ServedShards::skip() {
  begin();
  wait_for_turn_of_round();
  end_step();
}

/// The gradients of a group are sent while servers still apply those of the group before.
GradientAges ServedShards::push(const ElementUpdate&, const PushRates& with) {
  const Span span("push", {}, &push_wait_seconds_);
  begin();
  if (config_.elastic && !std::exchange(knows_data_, true))
    log_warning(
        "workers come and go, and the program has not asked which step's data it takes: each worker may take the same "
        "samples. hint: before each step call Engine::take_step, and go to its data by TokenBatches::go_to_step, or "
        "take a StepSampler");
  wait_for_turn_of_round();
  GradientAges ages;
  std::optional<std::size_t> before;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const Group& group = groups_[i];
    const auto used = with.used.subspan(group.first_parameter, group.flat->parameters.size());
    if (std::ranges::find(used, char{1}) == used.end()) continue;
    send_push(i, {with.rates, used, with.learning_rates, with.options});
    if (before) end_push(*before, ages);
    before = i;
  }
  if (before) end_push(*before, ages);
  end_step();
  return ages;
}

void ServedShards::send_push(std::size_t index, const PushRates& with) {
  const Group& group = groups_[index];
  const FlatGroup& flat = *group.flat;
  const bool sends_pulled = config_.delay_compensation.lambda != 0;
  const PushedNumbers numbers{with.rates.gradient_scale, with.rates.clip_value, with.rates.lr,
                              with.rates.is_first_of_run ? 1 : 0};
  for (int server = 0; server < servers(); ++server) {
    const Extent part = group.parts[static_cast<std::size_t>(server)];
    if (part.numel == 0) continue;
    MessageHead head;
    head.kind = MessageKind::kPush;
    head.shard = static_cast<std::uint32_t>(index);
    head.first = group.pulled[static_cast<std::size_t>(server)];
    head.turn = next_turn(index, server, /*is_push=*/true);
    const auto pulled = part_of(reinterpret_cast<const float*>(flat.full), part.offset, sends_pulled ? part.numel : 0);
    ask(server, head,
        {bytes_of(numbers), std::as_bytes(with.learning_rates), std::as_bytes(with.options), std::as_bytes(with.used),
         part_of(flat.gradient, part.offset - flat.gradient_part.offset, part.numel), pulled},
        "push");
  }
}

void ServedShards::end_push(std::size_t index, GradientAges& ages) {
  const Group& group = groups_[index];
  for (int server = 0; server < servers(); ++server) {
    if (group.parts[static_cast<std::size_t>(server)].numel == 0) continue;
    const MessageHead reply = hear(server, "push");
    ages.add(reply.first - group.pulled[static_cast<std::size_t>(server)]);
    note(index, server, /*is_push=*/true, reply);
  }
}

void ServedShards::adopt() {
  if (has_begun_)
    throw Error(ExitCode::kUsage,
                self() +
                    ": parameters were written after training has begun, and other workers train them (\"sync\" "
                    "elastic). hint: load and write values before the first step");
  if (gives_values_) write_values();
  board_.meet("asynchronous values");
  copy(0, groups_.size(), MessageKind::kCopy);
  board_.meet("asynchronous values");
}

/// Each rank gives the servers its own part, values and states.
void ServedShards::write_values() {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const FlatGroup& flat = *groups_[i].flat;
    for (int server = 0; server < servers(); ++server) {
      const Extent run = intersect(flat.optimizer_part, groups_[i].parts[static_cast<std::size_t>(server)]);
      if (run.numel == 0) continue;
      MessageHead head;
      head.kind = MessageKind::kWrite;
      head.shard = static_cast<std::uint32_t>(i);
      head.first = run.offset;
      head.second = run.numel;
      const std::int64_t in_part = run.offset - flat.optimizer_part.offset;
      const auto state = [&](std::size_t k) {
        const auto* const data = reinterpret_cast<const float*>(flat.state[k].data);
        return data ? part_of(data, in_part, run.numel) : std::span<const std::byte>();
      };
      static_assert(kMostStates == 4);
      ask(server, head,
          {part_of(reinterpret_cast<const float*>(flat.full), run.offset, run.numel), state(0), state(1), state(2),
           state(3)},
          "first values");
      hear(server, "first values");
    }
  }
}

void ServedShards::bring_together() {
  board_.meet("asynchronous ranks come together");
  // Workers that come and go do not meet, so they wait with their pushes.
  if (config_.elastic) tell_all(MessageKind::kHold, "states");
  for (std::size_t unit = 0; unit + 1 < first_group_.size(); ++unit) {
    take_as_fresh(unit);
    copy(first_group_[unit], first_group_[unit + 1], MessageKind::kPull);
  }
  fetch_states();
  if (config_.elastic) tell_all(MessageKind::kRelease, "states");
  board_.meet("asynchronous ranks come together");
}

/// Fetches the states and counts of this rank's own part. Nobody pushes meanwhile.
void ServedShards::fetch_states() {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    Group& group = groups_[i];
    const FlatGroup& flat = *group.flat;
    MessageHead head;
    head.shard = static_cast<std::uint32_t>(i);
    for (int server = 0; server < servers(); ++server) {
      const Extent run = intersect(flat.optimizer_part, group.parts[static_cast<std::size_t>(server)]);
      if (run.numel == 0) continue;
      head.kind = MessageKind::kReadStates;
      head.first = run.offset;
      head.second = run.numel;
      ask(server, head, {}, "states");
      hear(server, "states");
      const std::int64_t begin = 4 * (run.offset - flat.optimizer_part.offset);
      for (const FlatGroup::State& state : flat.state)
        if (state.data) take(server, {state.data + begin, static_cast<std::size_t>(run.numel) * 4}, "states");
    }
    // All pushes have ended, so shards of a group have equal counts. The last server has elements of each group.
    head.kind = MessageKind::kReadCounts;
    ask(servers() - 1, head, {}, "counts");
    hear(servers() - 1, "counts");
    take(servers() - 1, std::as_writable_bytes(std::span(group.counts)), "counts");
  }
}

void ServedShards::share_counts() {
  const bool writes = board_.rank() == 0 && gives_values_ && !has_begun_;
  for (std::size_t i = 0; i < groups_.size() && writes; ++i) {
    for (int server = 0; server < servers(); ++server) {
      MessageHead head;
      head.kind = MessageKind::kWriteCounts;
      head.shard = static_cast<std::uint32_t>(i);
      ask(server, head, {std::as_bytes(std::span(groups_[i].counts))}, "counts");
      hear(server, "counts");
    }
  }
  board_.meet("counts of steps");
}

void ServedShards::take_newest() {
  if (!is_over_) copy(0, groups_.size(), MessageKind::kCopy);
}

}  // namespace tessera
