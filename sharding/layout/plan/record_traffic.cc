#include "sharding/layout/plan/record_traffic.h"

#include <algorithm>
#include <utility>

namespace tessera {

RecordList RecordList::without(const EvenSpread& cached) const {
  RecordList others;
  std::size_t record = 0;
  for (const std::size_t end : std::span(first).subspan(1)) {
    for (; record < end; ++record) {
      if (!cached.has(static_cast<std::int64_t>(record))) others.bytes.push_back(bytes[record]);
    }
    others.end_owner();
  }
  return others;
}

RecordSlots::RecordSlots(std::span<const std::int64_t> bytes, std::int64_t slots)
    : before_(bytes.size() + 1), slots_(static_cast<std::size_t>(slots)) {
  for (std::size_t i = 0; i < bytes.size(); ++i) before_[i + 1] = before_[i] + bytes[i];
}

std::int64_t RecordSlots::use(std::size_t record) {
  if (const auto found = std::ranges::find(kept_, record); found != kept_.end()) {
    std::rotate(found, found + 1, kept_.end());
    return 0;
  }
  if (slots_ > 0 && kept_.size() == slots_) kept_.erase(kept_.begin());
  if (slots_ > 0) kept_.push_back(record);
  return bytes_of(record, record + 1);
}

std::int64_t RecordSlots::go_through(std::span<const Stretch> stretches) {
  std::size_t all = 0, passed = 0;
  for (const Stretch& stretch : stretches) all += stretch.end - stretch.begin;
  const std::size_t last = all - std::min(all, slots_);  // the slots keep all records from this one on until the end of
                                                         // the pass
  std::int64_t read = 0;
  for (const Stretch& stretch : stretches) {
    const std::size_t length = stretch.end - stretch.begin;
    const auto nth = [&](std::size_t i) { return stretch.backward ? stretch.end - 1 - i : stretch.begin + i; };
    const std::size_t head = std::min(length, slots_ - std::min(slots_, passed));
    const std::size_t tail = std::max(head, std::min(length, last - std::min(last, passed)));
    for (std::size_t i = 0; i < head; ++i) read += use(nth(i));
    read += stretch.backward ? bytes_of(stretch.end - tail, stretch.end - head)
                             : bytes_of(stretch.begin + head, stretch.begin + tail);
    for (std::size_t i = tail; i < length; ++i) read += use(nth(i));
    passed += length;
  }
  return read;
}

namespace {

/// Simulates steps on the records of one kind, and counts the bytes that move.
class StepPlayer {
 public:
  StepPlayer(RecordKind kind, const RecordList& records, std::int64_t slots)
      : kind_(kind), records_(records), slots_(records.bytes, slots) {}

  void play(const StepProgram& program) {
    has_sums_ = false;
    for (const StepOp& op : program.ops) play(program, op);
  }
  RecordMoves take_moves() { return std::exchange(moves_, {}); }

 private:
  void play(const StepProgram& program, const StepOp& op) {
    switch (op.kind) {
      case StepOpKind::kRounds:
        return go_backward(op.begin);
      case StepOpKind::kBackward:
        return go_backward(1);
      case StepOpKind::kUpdateInBackward:
        go_backward(1);
        return update_in_backward(program, op);
      case StepOpKind::kVisit:
        return visit(program.visits_of(op));
      case StepOpKind::kExchange:
        exchange({0, records_.bytes.size()});
        return visit(program.visits_of(op));
      default:
        return;
    }
  }

  /// Simulates updates in backward. If no record is visited twice, the visits of all units are one pass.
  void update_in_backward(const StepProgram& program, const StepOp& op) {
    if (!program.announces_units) return visit(program.visits_of(op));
    for (std::size_t unit = program.unit_ops.size(); unit-- > 0;) {
      for (const StepOp& of_unit : program.unit_ops[unit]) {
        if (of_unit.kind == StepOpKind::kExchange) exchange(states_of(unit));
        if (of_unit.kind == StepOpKind::kExchange || of_unit.kind == StepOpKind::kVisit)
          visit(program.visits_of(of_unit));
      }
    }
  }

  /// Goes over sums of gradients, beginning with the last unit. A step's first microbatch overwrites them; all later
  /// microbatches move the same bytes.
  void go_backward(std::int64_t rounds) {
    if (kind_ != RecordKind::kGradients) return;
    for (std::int64_t left = rounds; left > 0;) {
      const std::int64_t times = has_sums_ ? left : 1;
      const Stretch all = {0, records_.bytes.size(), /*backward=*/true};
      const std::int64_t read = slots_.go_through({&all, 1});
      moves_.read += has_sums_ ? times * read : 0;
      moves_.written += times * bytes_of(all);
      has_sums_ = true;
      left -= times;
    }
  }

  /// Counts an exchange of states of whole tensors: those of all units, batch by batch, or those of one unit.
  void exchange(Stretch states) {
    if (kind_ != RecordKind::kTensorStates) return;
    moves_.read += slots_.go_through({&states, 1});
    moves_.written += bytes_of(states);
  }

  /// Returns the range of records with a unit's states of whole tensors.
  Stretch states_of(std::size_t unit) const {
    return kind_ == RecordKind::kTensorStates ? Stretch{records_.first[unit], records_.first[unit + 1]} : Stretch{};
  }

  void visit(std::span<const Visit> visits) {
    std::vector<Stretch> stretches;
    std::int32_t unit = -1;
    for (const Visit& visit : visits) {
      const Access access = access_of(visit);
      if (access == Access::kNone) continue;
      // A unit's gradients are brought once for all visits of this unit that follow each other.
      if (kind_ == RecordKind::kGradients && std::exchange(unit, visit.unit) == visit.unit) continue;
      const Stretch stretch = stretch_of(visit);
      stretches.push_back(stretch);
      if (access == Access::kWrite) moves_.written += bytes_of(stretch);
    }
    moves_.read += slots_.go_through(stretches);
  }

  Access access_of(const Visit& visit) const {
    switch (kind_) {
      case RecordKind::kParameters:
        return visit.parameters;
      case RecordKind::kStates:
        return visit.states;
      case RecordKind::kGradients:
        return visit.needs_gradients ? Access::kRead : Access::kNone;
      case RecordKind::kTensorStates:
        return Access::kNone;
    }
    return Access::kNone;
  }

  Stretch stretch_of(const Visit& visit) const {
    const auto owner = static_cast<std::size_t>(kind_ == RecordKind::kGradients ? visit.unit : visit.group);
    return {records_.first[owner], records_.first[owner + 1], visit.backward};
  }

  std::int64_t bytes_of(const Stretch& stretch) const { return slots_.bytes_of(stretch.begin, stretch.end); }

  const RecordKind kind_;
  const RecordList& records_;
  RecordSlots slots_;
  bool has_sums_ = false;  ///< whether sums of earlier microbatches exist
  RecordMoves moves_;
};

}  // namespace

RecordMoves moves_in_two_steps(std::span<const StepProgram> programs, RecordKind kind, const RecordList& records,
                               std::int64_t slots) {
  if (records.bytes.empty()) return {};
  StepPlayer player(kind, records, slots);
  const auto play_two = [&] {
    player.play(programs.front());
    player.play(programs.back());
    return player.take_moves();
  };
  play_two();  // the slots now have the content that they have after many steps
  return play_two();
}

}  // namespace tessera
