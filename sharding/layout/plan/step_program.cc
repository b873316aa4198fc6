#include "sharding/layout/plan/step_program.h"

#include <utility>

namespace tessera {

// This file writes the programs of a step.
//
// ProgramWriter appends visits and operations in the order in which they are executed. `write` chooses by the rule's
// first pass: none (`update_once`), one that measures norms (`update_layers`), one for matrices
// (`update_with_matrices`), or any of these unit by unit in backward (`update_in_backward`). If passes alternate
// between forward and backward, `step_programs` returns a second program, which is written with `turned_`.

namespace {

/// Returns whether each pass goes in the opposite direction of the pass before it, whose last records are still in
/// memory. On a CPU, passes also alternate if the step waits for published values. In all other cases passes go in the
/// order in which the next forward needs the values.
bool alternates(const StepInput& input) {
  if (!input.executor.queued) return input.parameters.exist || input.states.exist || !input.publishes_behind;
  return !input.executor.host_updates && !input.gradients_below &&
         ((input.parameters.exist && input.parameters.in_files) || (input.states.exist && input.states.in_files));
}

bool has_matrices(const StepInput& input) {
  return input.first_work == VisitWork::kDirections || input.first_work == VisitWork::kReadMasters;
}

/// Writes the programs for one StepInput.
class ProgramWriter {
 public:
  /// `turned` is true for the second of the two programs.
  ProgramWriter(const StepInput& input, bool turned) : input_(input), turned_(turned) {
    program_.ends_when_skipped = !input.executor.queued || input.first_work == VisitWork::kReadMasters;
  }

  StepProgram write() {
    if (input_.rounds > 1) add(StepOpKind::kRounds, input_.rounds - 1);
    add(StepOpKind::kForward);
    if (input_.updates_in_backward) {
      update_in_backward();
    } else if (has_matrices(input_)) {
      update_with_matrices();
    } else if (input_.first_work != VisitWork::kUpdate) {
      update_layers();
    } else {
      update_once();
    }
    return std::move(program_);
  }

  StepProgram write_averages() {
    append(Which::kAll, VisitWork::kSwapAverages, turned_);
    add(StepOpKind::kAnnounce, 0, next());
    add(StepOpKind::kVisit, 0, next());
    finish();
    return std::move(program_);
  }

 private:
  enum class Which : std::uint8_t { kAll, kElements, kMatrices };

  std::int64_t next() const { return static_cast<std::int64_t>(program_.visits.size()); }
  void add(StepOpKind kind, std::int64_t begin = 0, std::int64_t end = 0) {
    program_.ops.push_back({kind, begin, end});
  }

  Access first_access(bool reads, bool moves) const {
    if (has_matrices(input_) && !reads) return Access::kNone;
    return moves ? Access::kWrite : Access::kRead;
  }

  Visit visit_of(std::size_t group, VisitWork work, bool backward) const {
    const StepInput::Group& of = input_.groups[group];
    Visit visit{of.unit, static_cast<std::int32_t>(group), work, backward};
    visit.needs_gradients = input_.gradients_below && of.by_device && work != VisitWork::kSwapAverages;
    const bool changes_values = work == VisitWork::kUpdate || work == VisitWork::kSwapAverages;
    const bool moves_states = work == VisitWork::kLayerUpdates || work == VisitWork::kDirections;
    visit.parameters = changes_values ? Access::kWrite : first_access(input_.first_reads_parameters, /*moves=*/false);
    visit.states = changes_values ? Access::kWrite : first_access(input_.first_reads_states, moves_states);
    return visit;
  }

  void append(Which which, VisitWork work, bool backward) {
    const std::size_t groups = input_.groups.size();
    for (std::size_t i = 0; i < groups; ++i) {
      const std::size_t group = backward ? groups - 1 - i : i;
      const bool is_wanted = which == Which::kAll || input_.groups[group].of_matrices == (which == Which::kMatrices);
      if (is_wanted) program_.visits.push_back(visit_of(group, work, backward));
    }
  }

  /// Adds backward, and the operations up to the decision. The visits [0, end) are the first pass, whose records are
  /// read ahead during backward.
  void train(std::int64_t end) {
    add(StepOpKind::kAnnounce, 0, end);
    add(StepOpKind::kBackward);
    decide();
  }
  void decide() {
    add(StepOpKind::kAgree);
    add(StepOpKind::kDecide);
  }

  /// Returns whether the pass that updates matrices goes backward, from the point at which the pass before it ended.
  bool comes_back() const { return !input_.executor.queued || alternates(input_); }
  /// Appends the announcement of records and the exchange of matrices. A GPU's host may have to wait for records, while
  /// other ranks wait for the exchange. If a GPU trains, Muon's exchange is therefore queued first. In all other cases
  /// records are brought while matrices are exchanged.
  void announce_and_exchange(std::vector<StepOp>& ops, std::int64_t begin) const {
    const bool is_muon = input_.first_work == VisitWork::kDirections, queued = input_.executor.queued;
    if (is_muon && queued) ops.push_back({StepOpKind::kExchange});
    ops.push_back({StepOpKind::kAnnounce, begin, next()});
    if (is_muon && !queued) ops.push_back({StepOpKind::kExchange});
  }

  void finish() {
    if (!input_.publishes_behind) add(StepOpKind::kPublished);
    if (input_.shares_parameters) add(StepOpKind::kBarrier);
    add(StepOpKind::kEndPass);
  }

  void update_once() {
    append(Which::kAll, VisitWork::kUpdate, turned_);
    train(next());
    add(StepOpKind::kVisit, 0, next());
    finish();
  }

  /// Adds updates in backward. Units are updated in the order in which their gradients are complete. Ranks agree on
  /// that order while they train. Usually it is the order of this program: the last unit comes first.
  void update_in_backward() {
    program_.announces_units = input_.first_work != VisitWork::kUpdate;
    std::int64_t announced = 0;
    for (std::size_t end = input_.groups.size(), begin = end; end > 0; end = begin) {
      const std::int32_t unit = input_.groups[end - 1].unit;
      while (begin > 0 && input_.groups[begin - 1].unit == unit) --begin;
      if (program_.unit_ops.empty()) program_.unit_ops.resize(static_cast<std::size_t>(unit) + 1);
      std::vector<StepOp>& ops = program_.unit_ops[static_cast<std::size_t>(unit)];
      ops = update_of(begin, end);
      if (announced == 0) announced = ops.front().end;
    }
    add(StepOpKind::kAnnounce, 0, program_.announces_units ? announced : next());
    add(StepOpKind::kUpdateInBackward, 0, next());
    decide();
    finish();
  }

  /// Appends visits of the groups [begin, end), which belong to one unit.
  void append(std::size_t begin, std::size_t end, VisitWork work, bool backward) {
    for (std::size_t i = begin; i < end; ++i)
      program_.visits.push_back(visit_of(backward ? begin + end - 1 - i : i, work, backward));
  }

  std::vector<StepOp> update_of(std::size_t begin, std::size_t end) {
    if (has_matrices(input_)) return update_matrices_of(begin, end);
    return program_.announces_units ? update_layers_of(begin, end) : update_once_of(begin, end);
  }

  std::vector<StepOp> update_once_of(std::size_t begin, std::size_t end) {
    const std::int64_t first = next();
    append(begin, end, VisitWork::kUpdate, /*backward=*/false);
    return {{StepOpKind::kVisit, first, next()}};
  }

  /// Returns the two passes over one unit. They do the same work as the two passes over all units.
  std::vector<StepOp> update_layers_of(std::size_t begin, std::size_t end) {
    const std::int64_t first = next();
    append(begin, end, input_.first_work, /*backward=*/false);
    const std::int64_t second = next();
    append(begin, end, VisitWork::kUpdate, alternates(input_));
    return {{StepOpKind::kAnnounce, first, second},
            {StepOpKind::kVisit, first, second},
            {StepOpKind::kAgreeOnNorms},
            {StepOpKind::kEndPass},
            {StepOpKind::kAnnounce, second, next()},
            {StepOpKind::kVisit, second, next()},
            {StepOpKind::kEndPass}};
  }

  /// Returns the operations for one unit with matrices. Groups without matrices are updated in the first pass, before
  /// the unit's matrices are exchanged.
  std::vector<StepOp> update_matrices_of(std::size_t begin, std::size_t end) {
    const auto of_matrices = [&](std::size_t group) { return input_.groups[group].of_matrices; };
    const bool is_muon = input_.first_work == VisitWork::kDirections;
    const std::int64_t first = next();
    for (std::size_t i = begin; i < end; ++i) {
      if (!of_matrices(i)) append(i, i + 1, VisitWork::kUpdate, /*backward=*/false);
    }
    const std::int64_t matrices = next();
    for (std::size_t i = begin; i < end; ++i) {
      if (of_matrices(i)) append(i, i + 1, input_.first_work, /*backward=*/false);
    }
    const std::int64_t second = next();
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t group = comes_back() ? begin + end - 1 - i : i;
      if (of_matrices(group)) append(group, group + 1, VisitWork::kUpdate, comes_back());
    }
    std::vector<StepOp> ops = {{StepOpKind::kAnnounce, first, second}};
    if (matrices > first) ops.push_back({StepOpKind::kVisit, first, matrices});
    if (second > matrices) ops.push_back({is_muon ? StepOpKind::kVisit : StepOpKind::kExchange, matrices, second});
    ops.push_back({StepOpKind::kEndPass});
    if (second == matrices) return ops;  // this unit has no matrices
    announce_and_exchange(ops, second);
    ops.push_back({StepOpKind::kVisit, second, next()});
    ops.push_back({StepOpKind::kEndPass});
    return ops;
  }

  /// Adds the two passes of layerwise rules. The pass that measures norms goes forward, since norms are added up in
  /// that order.
  void update_layers() {
    append(Which::kAll, input_.first_work, /*backward=*/false);
    const std::int64_t first = next();
    append(Which::kAll, VisitWork::kUpdate, alternates(input_));
    train(first);
    add(StepOpKind::kVisit, 0, first);
    add(StepOpKind::kAgreeOnNorms);
    add(StepOpKind::kEndPass);
    add(StepOpKind::kAnnounce, first, next());
    add(StepOpKind::kVisit, first, next());
    finish();
  }

  /// Adds the two passes of rules with matrices. The first pass goes forward over elements, and over directions or
  /// masters of matrices. The second pass updates matrices. The program of every second step updates elements last, in
  /// the second pass, and goes over them backward.
  void update_with_matrices() {
    const bool is_muon = input_.first_work == VisitWork::kDirections;
    if (!turned_) append(Which::kElements, VisitWork::kUpdate, /*backward=*/false);
    const std::int64_t elements = next();
    append(Which::kMatrices, input_.first_work, /*backward=*/false);
    const std::int64_t first = next();
    append(Which::kMatrices, VisitWork::kUpdate, comes_back());
    if (turned_) append(Which::kElements, VisitWork::kUpdate, comes_back());
    train(first);
    if (elements > 0) add(StepOpKind::kVisit, 0, elements);
    add(is_muon ? StepOpKind::kVisit : StepOpKind::kExchange, elements, first);
    add(StepOpKind::kEndPass);
    announce_and_exchange(program_.ops, first);
    add(StepOpKind::kVisit, first, next());
    finish();
  }

  const StepInput& input_;
  const bool turned_;
  StepProgram program_;
};

/// Returns whether steps alternate between two programs. Steps that measure norms always go forward in their first
/// pass. After backward the offloaded gradients of the first units are still in memory, so steps with such gradients
/// begin with these units too. On a CPU, the order of elements and matrices is reversed in each step, whether they are
/// offloaded or not.
bool takes_turns(const StepInput& input) {
  if (input.updates_in_backward) return false;
  if (has_matrices(input)) return !input.executor.queued || alternates(input);
  return input.first_work == VisitWork::kUpdate && !input.gradients_below && alternates(input);
}

/// Returns whether a step's first pass goes backward. If a GPU host's CPU updates groups, it does so in the order in
/// which their gradients arrive.
bool begins_backward(const StepInput& input) { return input.executor.host_updates && !input.gradients_below; }

}  // namespace

std::vector<StepProgram> step_programs(const StepInput& input) {
  std::vector<StepProgram> programs = {ProgramWriter(input, begins_backward(input)).write()};
  if (takes_turns(input)) programs.push_back(ProgramWriter(input, /*turned=*/true).write());
  return programs;
}

std::vector<StepProgram> averages_programs(const StepInput& input) {
  std::vector<StepProgram> programs = {ProgramWriter(input, begins_backward(input)).write_averages()};
  if (!input.gradients_below && alternates(input))
    programs.push_back(ProgramWriter(input, /*turned=*/true).write_averages());
  return programs;
}

}  // namespace tessera
