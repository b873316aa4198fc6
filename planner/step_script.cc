#include "planner/step_script.h"

#include <fmt/format.h>

#include <algorithm>

#include "planner/gather_script.h"
#include "planner/reduction_script.h"
#include "planner/script_writer.h"
#include "planner/update_script.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

/// [entry]: is it the last one of its unit's backward? Then the unit has all its gradients.
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
  if (plan.streamed_bytes() > 0)
    left_out.push_back("records of optimizer states that go through the GPU in the update");
  if (plan.steps_on_host())
    left_out.push_back("the update of optimizer states by the CPU of a GPU's host, and what is copied for it");
  const bool has_records = plan.state_records().records + plan.tensor_state_records().records > 0;
  if (plan.streamed_bytes() == 0 && !plan.steps_on_host() && has_records)
    left_out.push_back("records of optimizer states that move beside forward and backward");
  if (plan.gradients_below()) left_out.push_back("records of gradients that move beside backward and the update");
  if (!plan.matrices().batches().empty()) left_out.push_back("the exchange of matrices with their owners");
  if (plan.input().is_durable) left_out.push_back("commits of durable steps");
  return left_out;
}

/// A step from its first microbatch to the next step's; or from its update, which is then that of the step before.
class WholeStep {
 public:
  WholeStep(const MemoryPlan& plan, const StepProfile& profile, const std::vector<int>& units)
      : plan_(plan),
        profile_(profile),
        units_(units),
        completes_(completes_units(profile, units, plan.input().units.size())),
        gathers_(plan) {}

  void write(ScriptWriter& writer) {
    UpdateScript update(plan_, profile_, writer);
    ReductionScript reductions(plan_, writer, [&](int unit) { update.update(unit); });
    if (update.publishes_behind()) update.update_all();  // of the step before
    gathers_.gather_ahead(writer);
    writer.work(Spending::kRest, profile_.rest_seconds, "rest");
    const std::int64_t rounds = plan_.input().accumulation;
    for (std::int64_t round = 0; round < rounds; ++round) write_round(writer, update, reductions, round + 1 == rounds);
    update.agree();
    if (!update.publishes_behind()) update.update_all();
    update.finish();
    gathers_.release_all(writer);
  }

 private:
  void write_round(ScriptWriter& writer, UpdateScript& update, ReductionScript& reductions, bool is_last) {
    for (std::size_t i = 0; i < units_.size(); ++i) {
      const ProfileEntry& entry = profile_.entries[i];
      gathers_.use(units_[i], writer);
      update.use(units_[i]);
      const char* const pass = entry.pass == RoundPass::kForward ? "forward" : "backward";
      writer.work(Spending::kCompute, entry.seconds, pass, units_[i]);
      if (completes_[i]) reductions.complete(units_[i]);
    }
    reductions.finish(is_last);
    gathers_.end_round();
  }

  const MemoryPlan& plan_;
  const StepProfile& profile_;
  const std::vector<int>& units_;
  const std::vector<char> completes_;
  GatherScript gathers_;
};

}  // namespace

absl::StatusOr<StepScript> script_of_step(const MemoryPlan& plan, const StepProfile& profile, const MeshLinks& links) {
  constexpr std::int64_t kMostUses = 1 << 21;
  const std::int64_t rounds = plan.input().accumulation;
  TESSERA_ASSIGN_OR_RETURN(const std::vector<int> units, units_of(profile, plan));
  if (rounds > kMostUses / static_cast<std::int64_t>(std::max<std::size_t>(units.size(), 1)))
    return make_error(
        ExitCode::kUsage,
        fmt::format("a step of {} microbatches, each of which uses units {} times, is longer than "
                    "what can be timed: {} uses. [T0637] hint: a smaller gradient_accumulation shows the same step",
                    rounds, units.size(), kMostUses));
  WholeStep step(plan, profile, units);
  StepScript first, steady;
  ScriptWriter first_writer(plan, links, first), steady_writer(plan, links, steady);
  step.write(first_writer);  // which records the order of units
  step.write(steady_writer);
  steady.left_out = what_is_left_out(plan);
  return steady;
}

}  // namespace tessera
