#include "planner/predicted_step.h"

#include <array>

#include "planner/outer_cost.h"
#include "planner/step_clock.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

PredictedWire wire_of(const AxisUse& use, double busy_s) {
  return {busy_s + use.own_work_s, use.calls, use.sent_bytes, use.latency_s, use.transfer_s};
}

PredictedWire operator+(const PredictedWire& a, const PredictedWire& b) {
  return {a.busy_s + b.busy_s, a.calls + b.calls, a.sent_bytes + b.sent_bytes, a.latency_s + b.latency_s,
          a.transfer_s + b.transfer_s};
}

StepBound bound_of(const PredictedStep& step, const StepScript& script) {
  const std::array<double, 4> least = {step.work_s(), step.shard.busy_s, step.replicate.busy_s,
                                       script.agreement.seconds()};
  std::size_t largest = 0;
  for (std::size_t i = 1; i < least.size(); ++i) largest = least[i] > least[largest] ? i : largest;
  return static_cast<StepBound>(largest);
}

}  // namespace

std::string name_of(StepBound bound) {
  switch (bound) {
    case StepBound::kCompute:
      return "compute";
    case StepBound::kShardWire:
      return "the wire on the shard axis";
    case StepBound::kReplicateWire:
      return "the wire on the replicate axis";
    case StepBound::kAgreement:
      return "the agreement of all ranks";
  }
  return "?";
}

absl::StatusOr<PredictedStep> predict_step(const MemoryPlan& plan, const StepProfile& profile, const MeshLinks& links) {
  TESSERA_ASSIGN_OR_RETURN(const StepScript script, script_of_step(plan, profile, links));
  StepClock clock(script, /*replicas=*/1, /*shards=*/1);
  const double start_s = 0;
  TESSERA_RETURN_IF_ERROR(clock.play({&start_s, 1}));
  const RankTimes& times = clock.times(0);
  PredictedStep step;
  step.seconds = times.end_s;
  step.compute_s = times.spent(Spending::kCompute);
  step.update_s = times.spent(Spending::kUpdate);
  step.rest_s = times.spent(Spending::kRest);
  step.stretch_s = times.stretch_s;
  step.exposed_gather_s = times.spent(Spending::kGather);
  step.exposed_reduction_s = times.spent(Spending::kReduction);
  step.exposed_publish_s = times.spent(Spending::kPublish);
  step.agreement_s = times.spent(Spending::kAgreement);
  step.shard = wire_of(script.shard, clock.busy_s(Axis::kShard, 0));
  step.replicate = wire_of(script.replicate, clock.busy_s(Axis::kReplicate, 0));
  const OuterCost outer = outer_cost(plan, step.seconds, links);
  step.exposed_outer_s = outer.exposed_s;
  step.seconds += outer.exposed_s;
  step.shard = step.shard + outer.shard;
  step.replicate = step.replicate + outer.replicate;
  step.bound = bound_of(step, script);
  step.left_out = script.left_out;
  if (plan.update().outer.start_step > 0)
    step.left_out.push_back("the steps before sync.start_step, which sum gradients over replicas");
  return step;
}

}  // namespace tessera
