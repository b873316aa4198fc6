// Tests the counts of records that steps read and write. They are compared with steps that are made record by record.

#include "sharding/layout/plan/record_traffic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace tessera {
namespace {

using Random = std::mt19937_64;

std::int64_t pick(Random& random, std::int64_t least, std::int64_t most) {
  return least + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most - least + 1));
}

bool chance(Random& random) { return pick(random, 0, 1) == 1; }

/// A slow model of slots, through which records go one by one. RecordSlots computes the same counts at once.
class SlowSlots {
 public:
  SlowSlots(const RecordList& records, std::int64_t slots)
      : records_(records), slots_(static_cast<std::size_t>(slots)) {}

  void use(std::size_t record, bool reads, bool writes) {
    const auto found = std::ranges::find(kept_, record);
    const bool is_kept = found != kept_.end();
    if (is_kept) kept_.erase(found);
    kept_.push_back(record);
    if (kept_.size() > slots_) kept_.erase(kept_.begin());
    if (reads && !is_kept) moves.read += records_.bytes[record];
    if (writes) moves.written += records_.bytes[record];
  }

  RecordMoves moves;

 private:
  const RecordList& records_;
  const std::size_t slots_;
  std::vector<std::size_t> kept_;
};

/// Makes a step record by record.
class SlowStep {
 public:
  SlowStep(RecordKind kind, const RecordList& records, SlowSlots& slots)
      : kind_(kind), records_(records), slots_(slots) {}

  void make(const StepProgram& program) {
    std::int64_t rounds = 0;
    for (const StepOp& op : program.ops) {
      const bool has_visits =
          op.kind == StepOpKind::kVisit || op.kind == StepOpKind::kExchange || op.kind == StepOpKind::kUpdateInBackward;
      if (op.kind == StepOpKind::kRounds) {
        for (; rounds < op.begin; ++rounds) backward(rounds);
      }
      if (op.kind == StepOpKind::kBackward || op.kind == StepOpKind::kUpdateInBackward) backward(rounds);
      if (op.kind == StepOpKind::kExchange) exchange(0, records_.bytes.size());
      if (has_visits) visit(program.visits_of(op));
      if (op.kind == StepOpKind::kUpdateInBackward) exchange_by_unit(program);
    }
  }

 private:
  void exchange(std::size_t begin, std::size_t end) {
    if (kind_ != RecordKind::kTensorStates) return;
    for (std::size_t record = begin; record < end; ++record) slots_.use(record, true, true);
  }

  void exchange_by_unit(const StepProgram& program) {
    for (std::size_t unit = program.unit_ops.size(); unit-- > 0;) {
      if (std::ranges::count(program.unit_ops[unit], StepOpKind::kExchange, &StepOp::kind) > 0)
        exchange(records_.first[unit], records_.first[unit + 1]);
    }
  }

  void backward(std::int64_t round) {
    if (kind_ != RecordKind::kGradients) return;
    for (std::size_t record = records_.bytes.size(); record-- > 0;) slots_.use(record, round > 0, true);
  }

  void visit(std::span<const Visit> visits) {
    for (const Visit& visit : visits) {
      if (kind_ == RecordKind::kGradients && visit.needs_gradients) use_all(visit.unit, visit.backward, Access::kRead);
      if (kind_ == RecordKind::kParameters) use_all(visit.group, visit.backward, visit.parameters);
      if (kind_ == RecordKind::kStates) use_all(visit.group, visit.backward, visit.states);
    }
  }

  void use_all(std::int32_t owner, bool backward, Access access) {
    const std::size_t begin = records_.first[static_cast<std::size_t>(owner)];
    const std::size_t end = records_.first[static_cast<std::size_t>(owner) + 1];
    for (std::size_t i = begin; access != Access::kNone && i < end; ++i)
      slots_.use(backward ? end - 1 - (i - begin) : i, true, access == Access::kWrite);
  }

  const RecordKind kind_;
  const RecordList& records_;
  SlowSlots& slots_;
};

RecordMoves slow_moves(const std::vector<StepProgram>& programs, RecordKind kind, const RecordList& records,
                       std::int64_t slots) {
  constexpr int kPairsBefore = 3;
  SlowSlots slow(records, slots);
  SlowStep step(kind, records, slow);
  for (int pair = 0; pair <= kPairsBefore; ++pair) {
    slow.moves = {};
    step.make(programs.front());
    step.make(programs.back());
  }
  return slow.moves;
}

StepInput random_input(Random& random) {
  StepInput input;
  const VisitWork works[] = {VisitWork::kUpdate, VisitWork::kMeasure, VisitWork::kLayerUpdates, VisitWork::kDirections,
                             VisitWork::kReadMasters};
  input.first_work = works[pick(random, 0, 4)];
  std::int32_t unit = 0;
  for (std::int64_t groups = pick(random, 1, 6); groups > 0; --groups) {
    input.groups.push_back({unit, chance(random), chance(random)});
    if (chance(random)) ++unit;
  }
  input.rounds = pick(random, 1, 5);
  input.first_reads_parameters = chance(random);
  input.first_reads_states = chance(random);
  input.parameters = {chance(random), true};
  input.states = {chance(random), true};
  input.gradients_below = input.first_work == VisitWork::kUpdate && chance(random);
  input.updates_in_backward = !input.gradients_below && chance(random);
  input.publishes_behind = chance(random);
  input.executor.queued = chance(random);
  return input;
}

/// Returns random records of `owners` owners. Each owner has at most `most` records.
RecordList random_records(Random& random, std::size_t owners, std::int64_t most) {
  RecordList records;
  for (std::size_t owner = 0; owner < owners; ++owner) {
    for (std::int64_t left = pick(random, 0, most); left > 0; --left) records.bytes.push_back(pick(random, 1, 1000));
    records.end_owner();
  }
  return records;
}

TEST(RecordTraffic, EqualsStepsMadeRecordByRecord) {
  Random random(1);
  for (int round = 0; round < 20000; ++round) {
    const StepInput input = random_input(random);
    const std::vector<StepProgram> programs = step_programs(input);
    const auto kind = static_cast<RecordKind>(pick(random, 0, 3));
    const std::int64_t most = kind == RecordKind::kGradients ? 1 : chance(random) ? 2 : 12;
    const RecordList records = random_records(random, input.groups.size(), most);
    const std::int64_t slots = pick(random, 1, 20);
    const RecordMoves fast = moves_in_two_steps(programs, kind, records, slots);
    const RecordMoves slow = slow_moves(programs, kind, records, slots);
    ASSERT_EQ(fast.read, slow.read) << round;
    ASSERT_EQ(fast.written, slow.written) << round;
  }
}

TEST(RecordTraffic, EveryVisitReadsWhereThereAreNoSlots) {
  StepInput input;
  input.groups = {{0}, {1}};
  input.first_work = VisitWork::kMeasure;
  RecordList records;
  for (const std::int64_t bytes : {3, 4}) {
    records.bytes.push_back(bytes);
    records.end_owner();
  }
  EXPECT_EQ(moves_in_two_steps(step_programs(input), RecordKind::kStates, records, 0).read, 4 * 7);
}

TEST(RecordTraffic, CachedRecordsLeaveTheListAndOthersKeepTheirOwner) {
  RecordList records;
  for (int owner = 0; owner < 3; ++owner) {
    for (int i = 0; i < 2 * owner; ++i) records.bytes.push_back(10 * owner + i);
    records.end_owner();
  }
  records.bytes.push_back(99);  // this record has no owner
  const RecordList all = records.without(EvenSpread(7, 0, 0)), half = records.without(EvenSpread(7, 3, 6));
  EXPECT_EQ(all.bytes, (std::vector<std::int64_t>{10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(all.first, records.first);
  EXPECT_EQ(half.bytes, (std::vector<std::int64_t>{10, 20, 22}));
  EXPECT_EQ(half.first, (std::vector<std::size_t>{0, 0, 1, 3}));
}

/// A model of 70 B parameters has 400,000 records on one rank. Each plan that is made while tiers are chosen counts
/// these records.
TEST(RecordTraffic, ManyRecordsAreCountedWithoutVisitingEach) {
  constexpr std::int64_t kRecords = 400'000, kGroups = 160;
  StepInput input;
  RecordList records;
  for (std::int32_t group = 0; group < kGroups; ++group) {
    input.groups.push_back({group});
    records.bytes.resize(static_cast<std::size_t>((group + 1) * kRecords / kGroups), 1);
    records.end_owner();
  }
  input.states = {.exist = true, .in_files = true};
  const std::vector<StepProgram> programs = step_programs(input);
  for (std::int64_t slots = 1; slots < 130; slots += 5) {
    const RecordMoves moves = moves_in_two_steps(programs, RecordKind::kStates, records, slots);
    ASSERT_EQ(moves.read, 2 * (kRecords - slots));
    ASSERT_EQ(moves.written, 2 * kRecords);
  }
}

}  // namespace
}  // namespace tessera
