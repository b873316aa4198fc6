#include <algorithm>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#include "engine/engine_state.h"
#include "runtime/base/log.h"
#include "runtime/border/expect.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "sharding/value_hash.h"
#include "tessera/engine.h"
#include "tessera/span.h"

namespace tessera {

namespace {

/// Private copies of units, for ranks that otherwise share one copy of the parameters. A write under a guard stays in
/// the rank's own copy until the guard stores it. `meet` and `close` are collective over the ranks that share.
class PrivateCopies {
 public:
  PrivateCopies(const std::vector<Unit*>& units, Collectives& sharers) : units_(units), sharers_(sharers) {
    std::int64_t bytes = 0;
    for (const Unit* unit : units_) bytes += unit->gathered_bytes();
    memory_ = Arena::plain("copies for Gathered", bytes);
    for_each_group([&](FlatGroup& group) {
      shared_.push_back(group.full);
      std::byte* copy = memory_.take(group.gathered_bytes());
      std::memcpy(copy, group.full, group.gathered_bytes());
      group.attach(copy);
    });
  }
  ~PrivateCopies() { give_up(); }
  PrivateCopies(const PrivateCopies&) = delete;
  PrivateCopies& operator=(const PrivateCopies&) = delete;

  /// Waits until all ranks have copied the parameters. No rank may write its part before that.
  void meet() { throw_if_error(sharers_.barrier("Gathered").wait()); }

  /// Waits until all ranks have written their parts. Makes the parameters use the shared memory again.
  void close() {
    throw_if_error(sharers_.barrier("Gathered").wait());
    give_up();
  }

  /// Makes the parameters use the shared memory again, whatever it contains.
  void give_up() {
    std::size_t i = 0;
    for_each_group([&](FlatGroup& group) { group.attach(shared_[i++]); });
    units_.clear();
  }

 private:
  template <class Visit>
  void for_each_group(const Visit& visit) {
    for (Unit* unit : units_) {
      for (auto& group : unit->groups) visit(*group);
    }
  }

  std::vector<Unit*> units_;
  Collectives& sharers_;
  Arena memory_;
  std::vector<std::byte*> shared_;
};

}  // namespace

struct Gathered::State {
  /// `may_be_written`: whether code of the program runs under the guard.
  State(Engine& owner, Mode mode_given, std::vector<Unit*> units_given, bool may_be_written = true)
      : training(owner.state_->training), mode(mode_given), units(std::move(units_given)) {
    if (mode == kEma) average.emplace(owner);
    training.expect_not_updated("Gathered");
    if (mode == kWrite) training.expect_weights("a Gathered guard that writes");
    expect(mode != kWrite || training.values.open_guards == training.values.open_writes, phrases::kWriteGuard,
           " under a guard that only reads, which would go on showing the values from before. "
           "[T1079] hint: close that guard first");
    if (mode == kWrite) training.bring_replicas_together("a Gathered guard that writes");
    training.job.or_abort("Gathered", [&] {
      training.expect_parameters();
      if (mode == kWrite) training.settle_commit();
      for (Unit* unit : units) {
        training.gathering.log->note_guard(unit->index);
        if (!unit->keeper()) continue;  // such units are always in memory
        unit->keeper()->hold(*unit);
        ++unit->guards;
      }
      if (mode == kWrite && training.plan.placement().shared) {
        copies.emplace(units, *training.axes.gather);
        copies->meet();
      }
      if (may_be_written && compares()) {
        const Span span("checks", "Gathered");
        for_each_value([&](const FlatGroup& group, std::size_t i) { shown.push_back(hash_of_gathered(group, i)); });
      }
    });
    ++training.values.open_guards;
    if (mode != kWrite) return;
    ++training.values.open_writes;
    for (Unit* unit : units) unit->gathered_hash = 0;
  }

  ~State() { unpin(); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void unpin() {
    if (!std::exchange(is_pinned, false)) return;
    --training.values.open_guards;
    if (mode == kWrite) --training.values.open_writes;
    for (Unit* unit : units) {
      if (!unit->keeper()) continue;
      --unit->guards;
      unit->keeper()->unpin(*unit);
    }
  }
  void store();
  /// Throws tessera::Error (64), with the parameter's name, if values have changed under this guard, which only reads.
  /// ParameterChecks uses the parameter's version to notice an operator that writes. A write through an array or a
  /// pointer does not change the version. Where ranks have shards or masters of their own, such a write would be lost.
  void expect_unwritten() const;
  /// Returns whether values stay the same under this guard unless the program writes them wrongly. A guard around this
  /// one may write, and under Hogwild other ranks write at any time.
  bool compares() const {
    return mode != kWrite && training.values.open_writes == 0 && training.sync.config().type != SyncType::kHogwild;
  }
  /// Calls `visit(group, i)` for every parameter of the guard's units.
  template <class Visit>
  void for_each_value(const Visit& visit) const {
    for (const Unit* unit : units) for_each_parameter(*unit, visit);
  }

  bool is_pinned = true;
  Training& training;
  Mode mode;
  std::vector<Unit*> units;
  std::optional<EmaWeights> average;  ///< kEma
  std::optional<PrivateCopies> copies;
  std::vector<std::uint64_t> shown;  ///< hash of each parameter when the guard began; empty if nothing is compared
  const int exceptions_at_start = std::uncaught_exceptions();
};

namespace {

std::vector<Unit*> units_with(const std::vector<std::unique_ptr<Unit>>& units,
                              const std::vector<at::Tensor>& parameters) {
  std::vector<Unit*> found;
  for (const auto& unit : units) {
    bool holds_one = false;
    for_each_parameter(*unit, [&](const FlatGroup& group, std::size_t i) {
      const auto is_it = [&](const at::Tensor& wanted) { return group.parameters[i].tensor.is_same(wanted); };
      holds_one = holds_one || std::any_of(parameters.begin(), parameters.end(), is_it);
    });
    if (holds_one) found.push_back(unit.get());
  }
  return found;
}

}  // namespace

Gathered::Gathered(Engine& engine, Mode mode)
    : state_(std::make_unique<State>(engine, mode, pointers_to(engine.state_->training.units))) {}

Gathered::Gathered(Engine& engine, const std::vector<at::Tensor>& parameters, Mode mode)
    : state_(std::make_unique<State>(engine, mode, units_with(engine.state_->training.units, parameters))) {}

Gathered::Gathered(Engine& engine, const std::vector<at::Tensor>& parameters, OwnUse)
    : state_(std::make_unique<State>(engine, kRead, units_with(engine.state_->training.units, parameters),
                                     /*may_be_written=*/false)) {}

void Gathered::State::store() {
  separate_given_values(units);
  for (Unit* unit : units) store_parameters(*unit, *training.job.axes.control);
  unpin();
  for (Unit* unit : units) {
    if (unit->keeper()) unit->keeper()->drop(*unit);  // gathered copies on other ranks are outdated
  }
  if (copies) copies->close();
  for (Unit* unit : units) training.values.checks->accept(*unit);
  training.sync.adopt();
}

void Gathered::State::expect_unwritten() const {
  if (shown.empty()) return;
  const Span span("checks", "Gathered");
  auto before = shown.begin();
  for_each_value([&](const FlatGroup& group, std::size_t i) {
    if (hash_of_gathered(group, i) == *before++) return;
    throw Error(
        ExitCode::kUsage,
        "parameter " + group.parameters[i].name + " of unit " + group.unit->name +
            " was written through an array or a pointer under " + say(phrases::kGuard) +
            ", which only reads: the write would be lost where ranks have parts of their own. [T1080] hint: write "
            "under " +
            say(phrases::kWriteGuard) + ", on all ranks; to change a copy, clone first");
  });
}

void Gathered::close() {
  if (!state_) return;
  const std::unique_ptr<State> state = std::move(state_);
  Training& training = state->training;
  training.job.or_abort("Gathered", [&] {
    if (state->mode == kWrite) {
      state->store();
    } else {
      training.expect_parameters();
      state->expect_unwritten();
      state->unpin();
    }
    if (auto& residency = training.gathering.residency) {
      for (Unit* unit : state->units) residency->spoil(*unit);
      residency->give_back_overflow();
    }
    throw_if_error(training.axes.status());  // a GPU's gathers may have failed after they were queued
  });
  if (state->average) state->average->close();
}

/// While an exception unwinds the stack, nothing is written back, because the other ranks perhaps never reach this
/// point.
Gathered::~Gathered() {
  if (state_ && std::uncaught_exceptions() > state_->exceptions_at_start) {
    state_.reset();
    return;
  }
  try {
    close();
  } catch (const std::exception& error) {
    log_error(std::string("Gathered: ") + error.what());
  }
}

}  // namespace tessera
