#include "engine/asynchronous/owned_shards.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "engine/memory/state_views.h"
#include "runtime/base/rank_name.h"
#include "runtime/border/throw.h"
#include "tessera/error.h"
#include "tessera/span.h"

namespace tessera {

// This file pulls and pushes shards in memory that all ranks map.
//
// Each shard has a robust mutex that processes share (Shard). A Holding takes the mutex, and ends this rank if the
// holder was killed. All ranks lay out their memory alike, so a rank finds another rank's values and states at a
// distance from its own (`place`). A pull copies values while it holds the shard (`pull_shard`). A push applies the
// rule while it holds the shard, in the thread of the rank that pushes (`push_shard`). If a recorded order is replayed,
// each pull and each push first waits for its turn (`await_turn`).

/// The data of a shard, other than values and states, that ranks share. Only the holder of the mutex reads or writes
/// `version`, and the shard's values, states and counts.
struct alignas(128) OwnedShards::Shard {
  static constexpr int kNobody = 0;

  pthread_mutex_t mutex;
  std::int64_t version;              ///< number of pushes that were applied
  std::atomic<std::int64_t> played;  ///< number of pushes and pulls so far, if a recorded order is replayed
  std::atomic<int> holder;           ///< 1 + the rank that holds the mutex, for messages; the number stays if that rank
                                     ///< ends
};

/// Takes and holds a shard's lock. A Holding waits for the lock no longer than comm.timeout_s. A rank that is killed
/// while it holds a lock leaves the shard half-updated, so the other ranks end.
class OwnedShards::Holding {
 public:
  /// `what`: this rank's operation. Throws tessera::Error (75).
  Holding(Shard& shard, PeerBoard& board, PeerBoard::What what) : shard_(shard), board_(board) {
    int error = pthread_mutex_trylock(&shard_.mutex);
    if (error == EBUSY) error = wait(what);
    if (error != 0) end_half_updated(what, error);
    shard_.holder.store(1 + board_.rank());
  }
  ~Holding() {
    shard_.holder.store(Shard::kNobody);
    pthread_mutex_unlock(&shard_.mutex);
  }
  Holding(const Holding&) = delete;
  Holding& operator=(const Holding&) = delete;

 private:
  /// Returns 0 if the lock was taken, and otherwise an error number.
  int wait(PeerBoard::What what) {
    const PeerBoard::Clock::time_point begin = PeerBoard::Clock::now();
    for (;;) {
      const int error = lock();
      if (error != ETIMEDOUT) return error;
      board_.look();
      if (board_.is_late(begin)) end_late(what);
    }
  }
  /// Tries for 100 ms to lock the mutex, and returns the result of the last try.
  int lock() const {
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += 100'000'000;
    until.tv_sec += until.tv_nsec / 1'000'000'000;
    until.tv_nsec %= 1'000'000'000;
    return pthread_mutex_clocklock(&shard_.mutex, CLOCK_MONOTONIC, &until);
  }
  std::string start_of(PeerBoard::What what) const { return rank_name(board_.rank(), board_.size()) + " " + what(); }
  /// The holder is not known if a rank was stopped after it had taken the lock and before it wrote its number.
  std::string name_of_holder() const {
    const int holder = shard_.holder.load();
    return holder == Shard::kNobody ? "a rank" : board_.name_of(holder - 1);
  }
  [[noreturn]] void end_late(PeerBoard::What what) {
    board_.note_failed();
    throw Error(ExitCode::kPeerLost,
                start_of(what) + ": timed out waiting for " + name_of_holder() +
                    ", which holds this shard (comm.timeout_s sets the limit). [T0831] hint: a rank holds a shard only "
                    "while it copies or updates it, so look for what stops that process: SIGSTOP, a debugger, or "
                    "memory that is swapped out");
  }
  [[noreturn]] void end_half_updated(PeerBoard::What what, int error) {
    const std::string holder = name_of_holder();
    if (error == EOWNERDEAD) pthread_mutex_unlock(&shard_.mutex);  // no rank can lock it from now on
    board_.look_for_the_dead();
    board_.note_failed();
    throw Error(ExitCode::kPeerLost,
                start_of(what) + ": " + holder +
                    " ended while it held this shard, which may be half-updated. [T0819] hint: what the rank that "
                    "ended first printed last, or its launcher, says why; go on from a checkpoint");
  }

  Shard& shard_;
  PeerBoard& board_;
};

namespace {

void make_mutex(pthread_mutex_t& mutex) {
  pthread_mutexattr_t kind;
  pthread_mutexattr_init(&kind);
  pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&mutex, &kind);
  pthread_mutexattr_destroy(&kind);
}

}  // namespace

OwnedShards::OwnedShards(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, PeerBoard& board,
                         HostCopies& copies)
    : PulledParameters(units, board, plan.update().outer.asynchronous, copies), update_(config_) {
  memory_ = Arena::part_of_common("shards", plan.passes().outer.shard_bytes, board.group());
  const auto owners = static_cast<std::size_t>(board.size());
  std::size_t parameters = 0, counts_numel = 0;
  for_each_trainable(units, [&](FlatGroup& flat) {
    Group& added = groups_.emplace_back();
    added.flat = &flat;
    added.is_whole = plan.has_whole_shard(flat.shape());
    added.pulled.resize(added.is_whole ? 1 : owners);
    if (added.is_whole) added.known_counts.resize(flat.parameters.size());
    if (plan.update().twice) added.norms.emplace(flat);
    added.first_shard = order_.shards();
    added.first_parameter = parameters;
    parameters += flat.parameters.size();
    counts_numel += flat.parameters.size() * added.pulled.size();
    for (int shard = 0; shard < added.shards(); ++shard) order_.add_shard({flat.unit->name, flat.index, shard});
    place(flat, plan);
  });
  memory_.expect_full();
  work_ = Arena::plain("whole matrices", 4 * plan.passes().outer.work);
  const auto shards_bytes = static_cast<std::int64_t>(order_.shards() * sizeof(Shard));
  const auto counts_bytes = static_cast<std::int64_t>(counts_numel * sizeof(std::int64_t));
  control_ = Arena::common("versions of shards", shards_bytes + counts_bytes, board.group());
  auto* counts = reinterpret_cast<std::int64_t*>(control_.data() + shards_bytes);
  for (Group& group : groups_) {
    group.counts = counts;
    counts += group.flat->parameters.size() * group.pulled.size();
    if (board.rank() != 0) continue;
    for (int shard = 0; shard < group.shards(); ++shard) make_mutex(shard_at(group, shard).mutex);
  }
  throw_if_error(order_.open(config_, {board.size(), "ranks", board.size()}, board.rank(), [&] { adopt(); }));
}

/// Takes memory for this rank's part of a group, and makes a view of each owner's part. Each owner's part lies at the
/// same offset in the owner's memory.
void OwnedShards::place(FlatGroup& flat, const MemoryPlan& plan) {
  std::byte* const values = memory_.take(flat.optimizer_part.numel * 4);
  const bool is_adaptive = config_.delay_compensation.adaptive;
  auto* const mean_squares =
      is_adaptive ? reinterpret_cast<float*>(memory_.take(flat.optimizer_part.numel * 4)) : nullptr;
  const StateFormats& formats = flat.records.state().states;
  for (std::size_t i = 0; i < formats.size(); ++i)
    flat.state[i].data = memory_.take(state_piece(formats[i], flat.optimizer_part.numel).data_bytes);
  const bool has_tensor_states = flat.of_tensors.part.numel > 0;
  if (has_tensor_states) flat.of_tensors.data = reinterpret_cast<float*>(memory_.take(flat.of_tensors.part.numel * 4));
  const PlannedPlacement& placement = plan.placement();
  for (int owner = 0; owner < board_.size(); ++owner) {
    FlatGroup view = flat.without_module();
    const std::int64_t there = (owner - board_.rank()) * memory_.bytes();
    view.unit = flat.unit;
    view.optimizer_part = owned(placement.optimizer, placement.mesh.of(owner), flat.layout.numel());
    view.parameter_part = view.optimizer_part;
    view.shard = values + there;
    view.gradient = copies_.gradient(flat);
    for (std::size_t i = 0; i < formats.size(); ++i) view.state[i].data += there;
    view.of_tensors.part = owned(placement.optimizer, placement.mesh.of(owner), flat.tensor_states.numel());
    if (has_tensor_states) view.of_tensors.data += there / static_cast<std::int64_t>(sizeof(float));
    groups_.back().views.push_back(std::move(view));
    if (is_adaptive)
      groups_.back().mean_squares.push_back(mean_squares + there / static_cast<std::int64_t>(sizeof(float)));
  }
}

OwnedShards::Shard& OwnedShards::shard_at(const Group& group, int shard) const {
  return reinterpret_cast<Shard*>(control_.data())[group.first_shard + static_cast<std::size_t>(shard)];
}

std::span<std::int64_t> OwnedShards::counts_at(const Group& group, int shard) const {
  const std::size_t count = group.flat->parameters.size();
  return {group.counts + count * static_cast<std::size_t>(shard), count};
}

std::span<const FlatGroup> OwnedShards::parts_of(const Group& group, int shard) const {
  return std::span(group.views).subspan(static_cast<std::size_t>(shard), static_cast<std::size_t>(group.part_count()));
}

std::span<std::int64_t> OwnedShards::counts(const FlatGroup& group) {
  const auto found = std::ranges::find(groups_, &group, &Group::flat);
  return found->is_whole ? std::span(found->known_counts) : counts_at(*found, board_.rank());
}

void OwnedShards::share_counts() {
  for (const Group& group : groups_) {
    if (group.is_whole && board_.rank() == 0) std::ranges::copy(group.known_counts, counts_at(group, 0).begin());
  }
  PulledParameters::share_counts();
}

std::string OwnedShards::what(const Group& group, int shard, const char* operation) const {
  return group.flat->unit->name + " " + operation + " of shard " + std::to_string(shard);
}

void OwnedShards::adopt() {
  for (Group& group : groups_) {
    const Extent part = group.flat->optimizer_part;
    copies_.bring(*group.flat, part);
    std::memcpy(group.views[static_cast<std::size_t>(board_.rank())].shard,
                copies_.values(*group.flat) + part.offset * 4, static_cast<std::size_t>(part.numel) * 4);
  }
  board_.meet("asynchronous values");
  for (Group& group : groups_) {
    copies_.open(*group.flat);
    for (int shard = 0; shard < group.shards(); ++shard) copy_shard(group, shard);
    copies_.send(*group.flat);
  }
  board_.meet("asynchronous values");
}

void OwnedShards::bring_together() {
  board_.meet("asynchronous ranks come together");
  for (std::size_t unit = 0; unit + 1 < first_group_.size(); ++unit) {
    take_as_fresh(unit);
    for (std::size_t i = first_group_[unit]; i < first_group_[unit + 1]; ++i) pull_group(groups_[i], /*first=*/0);
  }
  for (Group& group : groups_)
    if (group.is_whole) std::ranges::copy(counts_at(group, 0), group.known_counts.begin());
  board_.meet("asynchronous ranks come together");
}

void OwnedShards::pull_unit(const Unit& unit) {
  const auto index = static_cast<std::size_t>(unit.index);
  board_.look();
  wait_for_the_slowest(unit);
  // Each rank begins at its own shards, so that the ranks do not all lock the same shard at the same time.
  for (std::size_t i = first_group_[index]; i < first_group_[index + 1]; ++i) pull_group(groups_[i], board_.rank());
}

/// Pulls all shards of a group. `first`: the owner whose shard comes first.
void OwnedShards::pull_group(Group& group, int first) {
  copies_.open(*group.flat);
  for (int k = 0; k < group.shards(); ++k) pull_shard(group, (first + k) % group.shards());
  copies_.send(*group.flat);
}

void OwnedShards::wait_for_the_slowest(const Unit& unit) {
  if (!bounds_staleness()) return;
  const std::int64_t least = step() - 1 - *config_.max_staleness;
  board_.wait([&] { return unit.name + " pull"; }, [&](int q) { return board_.pushed(q) >= least; });
}

void OwnedShards::pull_shard(Group& group, int shard) {
  await_turn(group, shard, /*is_push=*/false);
  Shard& there = shard_at(group, shard);
  const Holding holding(there, board_, [&] { return what(group, shard, "pull"); });
  copy_shard(group, shard);
  note(group, shard, /*is_push=*/false, there.version);
}

/// REQUIRES: this rank holds the shard's lock, or no rank pushes. The group's copy is open (HostCopies::open).
void OwnedShards::copy_shard(Group& group, int shard) {
  for (const FlatGroup& part : parts_of(group, shard))
    std::memcpy(copies_.values(*group.flat) + part.optimizer_part.offset * 4, part.shard,
                static_cast<std::size_t>(part.optimizer_part.numel) * 4);
  group.pulled[static_cast<std::size_t>(shard)] = shard_at(group, shard).version;
}

void OwnedShards::take_newest() {
  for (Group& group : groups_) {
    copies_.open(*group.flat);
    for (int shard = 0; shard < group.shards(); ++shard) {
      const Holding holding(shard_at(group, shard), board_, [&] { return what(group, shard, "last copy"); });
      copy_shard(group, shard);
    }
    copies_.send(*group.flat);
  }
}

/// With max_staleness 0, no rank pushes while other ranks pull or compute, and ranks push one after the other.
void OwnedShards::wait_for_turn_of_round() {
  const std::int64_t now = step();
  board_.note_computed(now);
  if (!bounds_staleness() || *config_.max_staleness != 0) return;
  const Span span("wait", {}, &push_wait_seconds_);
  const auto operation = [] { return std::string("push"); };
  board_.wait(operation, [&](int q) { return board_.computed(q) >= now; });
  board_.wait(operation, [&](int q) { return q >= board_.rank() || board_.pushed(q) >= now; });
}

GradientAges OwnedShards::push(const ShardRule& rule, const PushRates& with) {
  const Span span("push");
  board_.look();
  wait_for_turn_of_round();
  GradientAges ages;
  for (Group& group : groups_) {
    const auto used = with.used.subspan(group.first_parameter, group.flat->parameters.size());
    if (std::ranges::find(used, char{1}) == used.end()) continue;
    for (int k = 0; k < group.shards(); ++k)
      push_shard(group, (board_.rank() + k) % group.shards(), rule, {with.rates, used}, ages);
  }
  end_step();
  return ages;
}

void OwnedShards::skip() {
  board_.look();
  wait_for_turn_of_round();
  end_step();
}

void OwnedShards::push_shard(Group& group, int shard, const ShardRule& rule, const PushRates& with,
                             GradientAges& ages) {
  await_turn(group, shard, /*is_push=*/true);
  Shard& there = shard_at(group, shard);
  const Holding holding(there, board_, [&] { return what(group, shard, "push"); });
  const std::int64_t age = there.version - group.pulled[static_cast<std::size_t>(shard)];
  ages.add(age);
  update_runs(group, shard, rule, with, age);
  note(group, shard, /*is_push=*/true, there.version);
  ++there.version;
}

void OwnedShards::apply(int owner, const ShardRule& rule, const PushRates& with) {
  for (Group& group : groups_) {
    const auto used = with.used.subspan(group.first_parameter, group.flat->parameters.size());
    if (std::ranges::find(used, char{1}) == used.end()) continue;
    Shard& there = shard_at(group, owner);
    const Holding holding(there, board_, [&] { return what(group, owner, "update"); });
    update_runs(group, owner, rule, {with.rates, used}, /*age=*/0);
    ++there.version;
  }
}

/// REQUIRES: this rank holds the shard's lock. `with.used` has one entry for each parameter of the group. If a
/// program's rule throws, the shard may be half-updated, so the other ranks end.
void OwnedShards::update_runs(Group& group, int shard, const ShardRule& rule, const PushRates& with, std::int64_t age) {
  const std::span<const FlatGroup> parts = parts_of(group, shard);
  PushedShard pushed{parts, counts_at(group, shard).data()};
  if (!group.mean_squares.empty())
    pushed.mean_squares = std::span(group.mean_squares).subspan(static_cast<std::size_t>(shard), parts.size());
  pushed.pulled = reinterpret_cast<const float*>(copies_.values(*group.flat)) + parts.front().optimizer_part.offset;
  pushed.norms = group.norms ? &*group.norms : nullptr;
  pushed.work = {reinterpret_cast<float*>(work_.data()), static_cast<std::size_t>(work_.bytes()) / sizeof(float)};
  try {
    update_.apply(*group.flat, pushed, rule, with, age);
  } catch (...) {
    board_.note_failed();
    throw;
  }
}

void OwnedShards::await_turn(const Group& group, int shard, bool is_push) {
  if (!order_.is_played()) return;
  const std::vector<ShardTurn>& turns = order_.turns(group.first_shard + static_cast<std::size_t>(shard));
  const Shard& there = shard_at(group, shard);
  const auto operation = [&] { return what(group, shard, is_push ? "push" : "pull"); };
  const auto whose = [&] {
    const auto played = static_cast<std::size_t>(there.played.load());
    return played < turns.size() ? turns[played].rank : -1;
  };
  // Other ranks may take their own turns meanwhile, but not this rank's turns.
  const auto has_turns = [&](int q) {
    const auto left = std::span(turns).subspan(std::min(turns.size(), static_cast<std::size_t>(there.played.load())));
    return std::ranges::find(left, q, &ShardTurn::rank) != left.end();
  };
  const Span span("wait", {}, is_push ? &push_wait_seconds_ : nullptr);  // pull_seconds_ already contains the wait of a
                                                                         // pull
  if (!has_turns(board_.rank())) {
    if (is_push) throw_if_error(end_of_turns(operation(), board_.rank()));
    board_.wait(operation, [&](int q) { return !has_turns(q); });
    return;
  }
  // The turn may pass from one rank to another while the board checks one rank after another. So this rank waits again
  // until it has the turn.
  while (whose() != board_.rank()) board_.wait(operation, [&](int q) { return q == board_.rank() || whose() != q; });
  throw_if_error(expect_turn(turns[static_cast<std::size_t>(there.played.load())], is_push, operation()));
}

void OwnedShards::note(const Group& group, int shard, bool is_push, std::int64_t version) {
  if (order_.is_recorded())
    order_.add({.number = board_.next_event(),
                .step = step(),
                .shard = group.first_shard + static_cast<std::size_t>(shard),
                .version = version,
                .rank = board_.rank(),
                .is_push = is_push});
  if (order_.is_played()) shard_at(group, shard).played.fetch_add(1);
}

}  // namespace tessera
