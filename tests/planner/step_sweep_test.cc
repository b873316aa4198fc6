// Tests properties that must hold for every strategy, on plans of all kinds with numbers of all kinds.

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/simulated_world.h"
#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

constexpr int kPlans = 1500;

double close_to(double seconds) { return 1e-9 * seconds + 1e-12; }

TEST(StepSweep, StepTimeIsTheSumOfItsParts) {
  std::mt19937_64 random(11);
  for (int i = 0; i < kPlans; ++i) {
    const RandomPlan plan = random_plan(random);
    const PredictedStep step = plan.timed.predicted();
    const double parts = step.work_s() + step.stretch_s + step.exposed_gather_s + step.exposed_reduction_s +
                         step.exposed_publish_s + step.agreement_s;
    EXPECT_NEAR(parts, step.seconds, close_to(step.seconds)) << plan.text;
    EXPECT_GE(step.stretch_s, -close_to(step.seconds)) << plan.text;
  }
}

/// Returns whether the transport uses CPU cores. Such a transport uses cores while computation also needs them, so its
/// time depends on the other work on these cores.
bool takes_cores(const TimedPlan& timed) {
  const auto takes = [](const Links& links) {
    return links.cpu_s_per_byte > 0 || links.sum_s_per_byte > 0 || links.coding.load > 0 ||
           links.all_gather.busy_beta_s_per_byte > 0;
  };
  return takes(timed.links.shard) || takes(timed.links.replicate);
}

TEST(StepSweep, StepTimeLiesBetweenItsLongestPartAndTheirSum) {
  std::mt19937_64 random(12);
  for (int i = 0; i < kPlans; ++i) {
    const RandomPlan plan = random_plan(random);
    const PredictedStep step = plan.timed.predicted();
    const double work = step.work_s(), shard = step.shard.transfer_s, replicate = step.replicate.transfer_s;
    const double slack = close_to(step.seconds);
    EXPECT_GE(step.seconds, std::max({work, shard, replicate, step.shard.busy_s, step.replicate.busy_s}) - slack)
        << plan.text;
    // Bytes that are sent beside compute take at most twice as long, since any_links draws no larger factor.
    EXPECT_LE(step.seconds, work + 2 * (alone_s(step.shard) + alone_s(step.replicate)) + step.agreement_s + slack)
        << plan.text;
    if (takes_cores(plan.timed)) continue;
    EXPECT_LE(step.seconds, work + alone_s(step.shard) + alone_s(step.replicate) + step.agreement_s + slack)
        << plan.text;
  }
}

/// Returns the relative change of the time of the step.
double change(const RandomPlan& plan, const TimedPlan& other) {
  const double before = plan.timed.predicted().seconds;
  return (other.predicted().seconds - before) / before;
}

/// Returns whether gathers and reductions can use one wire at the same time.
bool shares_the_wire(const TimedPlan& timed) {
  return timed.links.shard.gathers_in_background && (timed.plan().gathers() || timed.input.update.in_backward);
}

/// Checks that the predicted step of `slower` is not faster than that of `plan`. If `is_exact` is false, the step may
/// be a little faster (StepClock explains why).
void expect_not_faster(const RandomPlan& plan, const TimedPlan& slower, bool is_exact) {
  constexpr double kMostAnomaly = 0.05;
  EXPECT_GE(change(plan, slower), is_exact ? -1e-9 : -kMostAnomaly) << plan.text;
}

TimedPlan with_links(TimedPlan timed, double times_beta, double more_alpha_s) {
  for (Links* links : {&timed.links.shard, &timed.links.replicate}) {
    for (OperationFit* fit : {&links->all_gather, &links->reduce_scatter, &links->all_reduce, &links->small}) {
      fit->beta_s_per_byte *= times_beta;
      fit->busy_beta_s_per_byte *= times_beta;
      fit->alpha_s += more_alpha_s;
      fit->busy_alpha_s += more_alpha_s;
    }
  }
  return timed;
}

double any_factor(std::mt19937_64& random) { return std::uniform_real_distribution<double>(1, 4)(random); }

TEST(StepSweep, MoreBandwidthNeverMakesAStepSlower) {
  std::mt19937_64 random(13);
  for (int i = 0; i < kPlans; ++i) {
    const RandomPlan plan = random_plan(random);
    expect_not_faster(plan, with_links(plan.timed, any_factor(random), 0), !takes_cores(plan.timed));
  }
}

TEST(StepSweep, LessLatencyNeverMakesAStepSlower) {
  std::mt19937_64 random(14);
  for (int i = 0; i < kPlans; ++i) {
    const RandomPlan plan = random_plan(random);
    const bool is_exact = !takes_cores(plan.timed) && !shares_the_wire(plan.timed);
    expect_not_faster(plan, with_links(plan.timed, 1, 1e-4), is_exact);
  }
}

TEST(StepSweep, MoreComputeNeverMakesAStepFaster) {
  std::mt19937_64 random(15);
  for (int i = 0; i < kPlans; ++i) {
    const RandomPlan plan = random_plan(random);
    TimedPlan all = plan.timed, one = plan.timed;
    const double factor = any_factor(random);
    for (ProfileEntry& entry : all.profile.entries) entry.seconds *= factor;
    expect_not_faster(plan, all, !takes_cores(plan.timed));
    one.profile.entries[random() % one.profile.entries.size()].seconds *= factor;
    expect_not_faster(plan, one, !takes_cores(plan.timed) && !shares_the_wire(plan.timed));
  }
}

TEST(StepSweep, StragglerNeverMakesTheWorldFaster) {
  std::mt19937_64 random(16);
  for (int i = 0; i < kPlans / 5; ++i) {
    const RandomPlan plan = random_plan(random);
    if (takes_cores(plan.timed) || shares_the_wire(plan.timed)) continue;
    const int ranks = plan.timed.input.placement.mesh.world_size();
    const WorldOptions options{.stragglers = {{static_cast<int>(random() % ranks), any_factor(random)}}, .steps = 3};
    const auto world = simulate_world(plan.timed.plan(), plan.timed.profile, plan.timed.links, options);
    ASSERT_TRUE(world.ok()) << world.status();
    EXPECT_GE(world->mean_s, plan.timed.predicted().seconds * (1 - 1e-9)) << plan.text;
  }
}

}  // namespace
}  // namespace tessera::testing
