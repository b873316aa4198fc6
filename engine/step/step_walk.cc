#include "engine/step/step_walk.h"

#include <algorithm>
#include <functional>

#include "tessera/span.h"

namespace tessera {
namespace {

StepInput input_of(const StepContext& context) {
  return context.plan.step_input(context.axes.gather->gathers_in_background());
}

const StepOp& first_of(const StepProgram& program, StepOpKind kind) {
  return *std::ranges::find(program.ops, kind, &StepOp::kind);
}

}  // namespace

StateKind kind_of(const Visit& visit) {
  if (visit.parameters == Access::kNone) return StateKind::kMastersAndStates;
  return visit.states == Access::kNone ? StateKind::kParameters : StateKind::kAll;
}

StateUse use_of(const Visit& visit) {
  if (visit.parameters == Access::kWrite) return StateUse::kUpdate;
  return visit.states == Access::kWrite ? StateUse::kUpdateStates : StateUse::kRead;
}

StepWalk::StepWalk(const StepContext& context, QueueClock* waits)
    : publisher_(context.plan, context.axes, context.behind, waits),
      gradients_(context.memory.gradient_carrier()),
      programs_(step_programs(input_of(context))),
      averages_(averages_programs(input_of(context))),
      in_backward_(context.plan.update().in_backward) {
  for_each_trainable(context.units, [&](FlatGroup& group) { flats_.push_back(&group); });
}

void StepWalk::expect(std::span<const int> order) {
  const StepProgram& program = next_of(programs_);
  if (!in_backward_) return announce(program.visits_of(first_of(program, StepOpKind::kAnnounce)), /*is_decided=*/false);
  if (program.announces_units) {
    order_.assign(order.begin(), order.end());
    announced_ = 0;
    return expect_next_unit();
  }
  expected_.clear();
  for (const int unit : order) {
    const std::span<const Visit> visits = visits_of(unit);
    expected_.insert(expected_.end(), visits.begin(), visits.end());
  }
  announce(expected_, /*is_decided=*/false);
}

/// Announces the records of the next unit. The unit's own operations announce its records again when they begin, since
/// at that time it is known which parameters are used.
void StepWalk::expect_next_unit() {
  if (announced_ == order_.size()) return;
  const StepProgram& program = programs_.front();
  const std::vector<StepOp>& ops = program.unit_ops[static_cast<std::size_t>(order_[announced_++])];
  announce(program.visits_of(ops.front()), /*is_decided=*/false);
}

/// Returns a unit's visits in backward. The program begins with the last unit.
std::span<const Visit> StepWalk::visits_of(int unit) const {
  const StepProgram& program = programs_.front();
  const std::span<const Visit> all = program.visits_of(first_of(program, StepOpKind::kUpdateInBackward));
  const auto [begin, end] = std::ranges::equal_range(all, unit, std::ranges::greater(), &Visit::unit);
  return {begin, end};
}

void StepWalk::update_unit(Unit& unit) {
  const StepProgram& program = programs_.front();
  unit_ = unit.index;
  publisher_.begin(unit);
  for (const StepOp& op : program.unit_ops[static_cast<std::size_t>(unit.index)]) follow(program, op);
  if (program.announces_units) expect_next_unit();
}

void StepWalk::finish() {
  const StepProgram& program = programs_.front();
  const StepOp* const end = program.ops.data() + program.ops.size();
  for (const StepOp* op = &first_of(program, StepOpKind::kDecide); op != end; ++op) follow(program, *op);
}

void StepWalk::update_all() { walk(programs_); }

void StepWalk::swap() { walk(averages_); }

void StepWalk::walk(const std::vector<StepProgram>& programs) {
  const StepProgram& program = next_of(programs);
  publisher_.begin();
  begin_gradients(program);
  for (const StepOp& op : program.ops) follow(program, op);
  if (gradients_) gradients_->flush();
  turn_ = (turn_ + 1) % programs.size();
}

void StepWalk::follow(const StepProgram& program, const StepOp& op) {
  switch (op.kind) {
    case StepOpKind::kAnnounce:
      return announce(program.visits_of(op), /*is_decided=*/true);
    case StepOpKind::kVisit:
      return visit_all(program.visits_of(op));
    case StepOpKind::kAgreeOnNorms:
      return agree_on_norms();
    case StepOpKind::kExchange:
      return exchange(program.visits_of(op));
    case StepOpKind::kEndPass:
      return end_pass();
    case StepOpKind::kPublished:
      return publisher_.wait();
    case StepOpKind::kBarrier:
      return publisher_.meet();
    case StepOpKind::kRounds:
    case StepOpKind::kForward:
    case StepOpKind::kBackward:
    case StepOpKind::kUpdateInBackward:
    case StepOpKind::kAgree:
    case StepOpKind::kDecide:
      return;  // the Engine and the Step do these
  }
}

void StepWalk::visit_all(std::span<const Visit> visits) {
  for (const Visit& visit : visits) {
    hold_gradients(visit);
    {
      const Span span(visit.work == VisitWork::kSwapAverages ? "averages" : "update", flat_of(visit).unit->name);
      make(visit);
    }
    if (visit.work == VisitWork::kUpdate || visit.work == VisitWork::kSwapAverages) publisher_.publish(flat_of(visit));
  }
  let_gradients_go();
}

/// Announces sums of gradients in the order of visits, so that they are read ahead in this order. Groups of one unit
/// follow each other.
void StepWalk::begin_gradients(const StepProgram& program) {
  if (!gradients_) return;
  std::vector<std::int64_t> order;
  for (const Visit& visit : program.visits) {
    if (visit.needs_gradients && is_updated(visit) && (order.empty() || order.back() != visit.unit))
      order.push_back(visit.unit);
  }
  gradients_->announce(order);
}

void StepWalk::hold_gradients(const Visit& visit) {
  Unit* const unit = flat_of(visit).unit;
  if (!visit.needs_gradients || held_ == unit || !is_updated(visit)) return;
  let_gradients_go();
  sums_ = gradients_->acquire(unit->index, LeaseUse::kRead);
  held_ = unit;
}

void StepWalk::let_gradients_go() {
  held_ = nullptr;
  sums_.give_back();
}

}  // namespace tessera
