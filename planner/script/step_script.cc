#include "planner/script/step_script.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "planner/script/gather_script.h"
#include "planner/script/reduction_script.h"
#include "planner/script/script_writer.h"
#include "planner/script/update_script.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

/// Returns, for each entry, whether it is the last entry of its unit's backward, after which all gradients of the unit
/// are complete.
std::vector<char> completes_units(const StepProfile& profile, const std::vector<int>& units, std::size_t unit_count) {
  std::vector<char> completes(units.size(), 0), is_later(unit_count, 0);
  for (std::size_t i = units.size(); i-- > 0;) {
    if (profile.entries[i].pass != RoundPass::kBackward) continue;
    char& later = is_later[static_cast<std::size_t>(units[i])];
    completes[i] = later ? 0 : 1;
    later = 1;
  }
  return completes;
}

std::vector<std::string> what_is_left_out(const MemoryPlan& plan) {
  std::vector<std::string> left_out;
  if (plan.parameters_below())
    left_out.push_back("parameters that are brought from below memory before a unit is gathered");
  if (plan.records().streamed_bytes > 0)
    left_out.push_back("records of optimizer states that go through the GPU in the update");
  if (plan.passes().steps_on_host)
    left_out.push_back("the update of optimizer states by the CPU of a GPU's host, and what is copied for it");
  const bool has_records = plan.records().states.records + plan.records().tensor_states.records > 0;
  if (plan.records().streamed_bytes == 0 && !plan.passes().steps_on_host && has_records)
    left_out.push_back("records of optimizer states that move beside forward and backward");
  if (plan.gradients_below()) left_out.push_back("records of gradients that move beside backward and the update");
  if (!plan.passes().matrices.batches().empty()) left_out.push_back("the exchange of matrices with their owners");
  if (plan.tiers().is_durable) left_out.push_back("commits of durable steps");
  if (plan.wire().backups > 0) left_out.push_back("microbatches of slow ranks that other ranks make again");
  return left_out;
}

/// Returns the updates in the order of units. In fact some passes are in the reverse order, and groups of matrices are
/// updated after the others; this function ignores both.
std::vector<Visit> updates_of(const StepProgram& program) {
  std::vector<Visit> updates;
  std::ranges::copy_if(program.visits, std::back_inserter(updates),
                       [](const Visit& visit) { return visit.work == VisitWork::kUpdate; });
  std::ranges::sort(updates, {}, &Visit::group);
  return updates;
}

/// Writes the instructions of a step according to its program (StepProgram). The script begins with the step's first
/// microbatch, and ends before the first microbatch of the next step. If values are published behind the update, the
/// script instead begins with the first update (in backward or after it), and ends before the next step's first update.
class WholeStep {
 public:
  WholeStep(const MemoryPlan& plan, const StepProfile& profile, const std::vector<int>& units, const MeshLinks& links)
      : plan_(plan),
        profile_(profile),
        units_(units),
        completes_(completes_units(profile, units, plan.units().size())),
        input_(plan.step_input(links.shard.gathers_in_background)),
        program_(step_programs(input_).front()),
        updates_(updates_of(program_)),
        gathers_(plan) {
    const auto is_backward = [](const ProfileEntry& entry) { return entry.pass == RoundPass::kBackward; };
    turn_ = static_cast<std::size_t>(std::ranges::find_if(profile.entries, is_backward) - profile.entries.begin());
  }

  void write(ScriptWriter& writer) {
    UpdateScript update(plan_, profile_, input_.publishes_behind, writer);
    ReductionScript reductions(plan_, writer, [&](int unit) { update_in_backward(unit, update); });
    Pen pen{writer, update, reductions};
    const std::vector<StepOp>& ops = program_.ops;
    const auto publishes = [](const StepOp& op) {
      return op.kind == StepOpKind::kVisit || op.kind == StepOpKind::kExchange ||
             op.kind == StepOpKind::kUpdateInBackward;
    };
    const auto first = input_.publishes_behind ? std::ranges::find_if(ops, publishes) : ops.begin();
    for (auto op = first; op != ops.end(); ++op) write(*op, pen);
    for (auto op = ops.begin(); op != first; ++op) write(*op, pen);
    update.wait_for_published();  // Some published values may not have been read by any operator, so the step waits for
                                  // them here.
    gathers_.release_all(writer);
  }

 private:
  struct Pen {
    ScriptWriter& writer;
    UpdateScript& update;
    ReductionScript& reductions;
  };

  void write(const StepOp& op, Pen& pen) {
    if (&op == program_.ops.data()) begin_step(pen);
    switch (op.kind) {
      case StepOpKind::kRounds:
        for (std::int64_t round = 0; round < op.begin; ++round) {
          write_entries(0, turn_, pen);
          write_backward(/*is_last=*/false, pen);
        }
        return;
      case StepOpKind::kForward:
        return write_entries(0, turn_, pen);
      case StepOpKind::kBackward:
      case StepOpKind::kUpdateInBackward:
        return write_backward(/*is_last=*/true, pen);
      case StepOpKind::kAgree:
      case StepOpKind::kAgreeOnNorms:
        return pen.update.agree();
      case StepOpKind::kVisit:
        if (op.end != std::ssize(program_.visits)) return;  // updates are written once, at the last pass of visits
        for (const Visit& visit : updates_) pen.update.update(visit);
        return;
      case StepOpKind::kPublished:
        return pen.update.wait_for_published();
      case StepOpKind::kBarrier:
        return pen.update.meet();
      case StepOpKind::kAnnounce:
      case StepOpKind::kDecide:
      case StepOpKind::kExchange:
      case StepOpKind::kEndPass:
        return;  // no time is predicted for these operations
    }
  }

  void begin_step(Pen& pen) {
    gathers_.gather_ahead(pen.writer);
    pen.writer.work(Spending::kRest, profile_.rest_seconds, "rest");
  }

  void write_backward(bool is_last, Pen& pen) {
    write_entries(turn_, units_.size(), pen);
    pen.reductions.finish(is_last);
    gathers_.end_round();
  }

  void write_entries(std::size_t begin, std::size_t end, Pen& pen) {
    for (std::size_t i = begin; i < end; ++i) {
      const ProfileEntry& entry = profile_.entries[i];
      gathers_.use(units_[i], pen.writer);
      pen.update.use(units_[i]);
      const char* const pass = entry.pass == RoundPass::kForward ? "forward" : "backward";
      pen.writer.work(Spending::kCompute, entry.seconds, pass, units_[i]);
      if (completes_[i]) pen.reductions.complete(units_[i]);
    }
  }

  void update_in_backward(int unit, UpdateScript& update) const {
    for (const StepOp& op : program_.unit_ops[static_cast<std::size_t>(unit)]) {
      if (op.kind == StepOpKind::kAgreeOnNorms) update.agree_on_norms(unit);
      if (op.kind != StepOpKind::kVisit) continue;  // no time is counted for the other operations of the program
      for (const Visit& visit : program_.visits_of(op)) {
        if (visit.work == VisitWork::kUpdate) update.update(visit);
      }
    }
  }

  const MemoryPlan& plan_;
  const StepProfile& profile_;
  const std::vector<int>& units_;
  const std::vector<char> completes_;
  const StepInput input_;
  const StepProgram program_;
  const std::vector<Visit> updates_;  ///< updates, in the order of units; all are made in the last pass
  std::size_t turn_ = 0;              ///< index of the first backward entry
  GatherScript gathers_;
};

}  // namespace

absl::StatusOr<StepScript> script_of_step(const MemoryPlan& plan, const StepProfile& profile, const MeshLinks& links) {
  constexpr std::int64_t kMostUses = 1 << 21;
  const std::int64_t rounds = plan.wire().accumulation;
  TESSERA_ASSIGN_OR_RETURN(const std::vector<int> units, units_of(profile, plan));
  if (rounds > kMostUses / static_cast<std::int64_t>(std::max<std::size_t>(units.size(), 1)))
    return make_error(
        ExitCode::kUsage,
        fmt::format("a step of {} microbatches, each of which uses units {} times, is longer than "
                    "what can be timed: {} uses. [T0637] hint: a smaller gradient_accumulation shows the same step",
                    rounds, units.size(), kMostUses));
  WholeStep step(plan, profile, units, links);
  StepScript first, steady;
  ScriptWriter first_writer(plan, links, first), steady_writer(plan, links, steady);
  step.write(first_writer);  // this first call only records the order of units
  step.write(steady_writer);
  steady.left_out = what_is_left_out(plan);
  name_units_without_times(profile, plan, steady.left_out);
  return steady;
}

}  // namespace tessera
