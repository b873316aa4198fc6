// Tests the script of a step. It lists the step's work and calls in the order of a real run.

#include "planner/script/step_script.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "runtime/base/status.h"
#include "tests/planner/timed_plans.h"

namespace tessera::testing {
namespace {

StepScript script_of(const TimedPlan& timed) {
  const auto script = script_of_step(timed.plan(), timed.profile, timed.links);
  EXPECT_TRUE(script.ok()) << script.status();
  return script.ok() ? *script : StepScript();
}

/// Returns the number of calls of each unit: [unit].
std::map<int, std::int64_t> calls_of(const StepScript& script, const std::string& what) {
  std::map<int, std::int64_t> calls;
  for (const WireCall& call : script.calls) {
    if (call.what == what) ++calls[call.unit];
  }
  return calls;
}

TEST(StepScript, UnitsAreGatheredAsOftenAsThePlanSays) {
  for (const ShardingStrategy strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp}) {
    for (const int blocks : {1, 2, 3, 5, 9}) {
      for (const std::int64_t prefetch : {0, 1, 2, 4}) {
        for (const std::int64_t accumulation : {1, 2, 3}) {
          TimedPlan timed = timed_plan(strategy, {1, 4, 0, 0}, blocks);
          timed.input.placement.prefetch = prefetch;
          timed.input.wire.accumulation = accumulation;
          const MemoryPlan plan = timed.plan();
          std::map<int, std::int64_t> gathers = calls_of(script_of(timed), "all_gather");
          for (int unit = 0; unit <= blocks; ++unit)
            EXPECT_EQ(gathers[unit], plan.gathers_in_step(static_cast<std::size_t>(unit)))
                << "unit " << unit << " of " << blocks << ", prefetch " << prefetch << ", " << accumulation;
        }
      }
    }
  }
}

TEST(StepScript, SecondCopyIsGatheredInsideWhereAUnitIsGatheredAgain) {
  for (const SecondaryForm form : {SecondaryForm::kPlain, SecondaryForm::kInt8}) {
    for (const std::int64_t accumulation : {1, 3}) {
      TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 5);
      timed.input.wire.accumulation = accumulation;
      timed.links.shard.all_gather = links_of(1e-6).all_gather;
      timed.links.secondary = links_of(1e-12);
      const double alone = timed.predicted().seconds;
      timed.input.placement.secondary = {.ranks = 2, .form = form};
      const MemoryPlan plan = timed.plan();
      const StepScript script = script_of(timed);
      std::map<int, std::int64_t> over_axis = calls_of(script, "all_gather");
      std::map<int, std::int64_t> inside = calls_of(script, "all_gather inside");
      for (int unit = 0; unit <= 5; ++unit) {
        const std::int64_t all = plan.gathers_in_step(static_cast<std::size_t>(unit));
        EXPECT_EQ(over_axis[unit], 1) << "unit " << unit;
        EXPECT_EQ(inside[unit], form == SecondaryForm::kPlain ? all - 1 : all) << "unit " << unit;
      }
      EXPECT_LT(timed.predicted().seconds, alone);
    }
  }
}

TEST(StepScript, EveryPostedCallIsWaitedFor) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    const RandomPlan plan = random_plan(random);
    const StepScript script = script_of(plan.timed);
    std::vector<int> posts(script.calls.size()), waits(script.calls.size());
    for (const Instruction& instruction : script.instructions) {
      if (instruction.kind == Instruction::Kind::kWork) continue;
      const auto call = static_cast<std::size_t>(instruction.call);
      (instruction.kind == Instruction::Kind::kPost ? posts : waits)[call] += 1;
      EXPECT_GE(posts[call], waits[call] > 0 ? 1 : 0);
    }
    EXPECT_TRUE(std::ranges::all_of(posts, [](int count) { return count == 1; })) << plan.text;
    EXPECT_TRUE(std::ranges::all_of(waits, [](int count) { return count >= 1; })) << plan.text;
  }
}

/// Returns the order in which gathers begin, gathers are waited for, and reductions begin. Each of these events has the
/// name of its span in a run's trace.
std::string order_of(const StepScript& script, const MemoryPlan& plan) {
  std::string order;
  for (const Instruction& instruction : script.instructions) {
    const std::string what = instruction.what;
    const bool is_span = what == "all_gather" || what == "reduce";
    if (!is_span && (what != "wait" || instruction.spending != Spending::kGather)) continue;
    const std::string& unit = plan.units()[static_cast<std::size_t>(instruction.unit)].name;
    order += (order.empty() ? "" : ", ") + what + " " + unit;
  }
  return order;
}

// The expected order is the one that `tessera train --trace` shows for the sixth step of a GPT of four blocks over gloo
// on two ranks: FULL_SHARD, prefetch 1, two microbatches, and two reductions ahead.
TEST(StepScript, GathersAndReductionsComeInTheOrderOfARealRun) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 2, 0, 0}, 4);
  timed.input.wire.accumulation = 2;
  timed.input.wire.reductions_ahead = 2;
  std::vector<ProfileEntry>& entries = timed.profile.entries;
  const std::vector<ProfileEntry> head = {{"(root)", RoundPass::kForward, 1}, {"(root)", RoundPass::kBackward, 2}};
  entries.insert(entries.begin() + 5, head.begin(), head.end());
  const std::string forward =
      "all_gather (root), all_gather blocks.0, wait (root), wait blocks.0, all_gather blocks.1, wait blocks.1, ";
  const std::string second = "all_gather blocks.2, wait blocks.2, all_gather blocks.3, wait blocks.3, ";
  const std::string backward =
      "reduce blocks.3, all_gather blocks.1, reduce blocks.2, wait blocks.1, all_gather blocks.0, reduce blocks.1, "
      "wait blocks.0, "
      "reduce blocks.0, reduce (root)";
  EXPECT_EQ(order_of(script_of(timed), timed.plan()), forward + second + backward + ", " + second + backward);
}

/// Returns the largest number of reductions that the script has under way at one time.
std::int64_t most_under_way(const StepScript& script) {
  std::int64_t under_way = 0, most = 0;
  for (const Instruction& instruction : script.instructions) {
    if (instruction.call < 0 || script.calls[static_cast<std::size_t>(instruction.call)].channel != Channel::kReduce)
      continue;
    under_way += instruction.kind == Instruction::Kind::kPost ? 1 : -1;
    most = std::max(most, under_way);
  }
  return most;
}

TEST(StepScript, ReductionsUnderWayNeverExceedThePlansBuckets) {
  for (const std::int64_t ahead : {0, 1, 2, 5}) {
    TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 9);
    timed.input.wire.reductions_ahead = ahead;
    EXPECT_EQ(most_under_way(script_of(timed)), 1 + ahead);
  }
}

TEST(StepScript, SharedMemorySumsAreTheRanksOwnWorkAtThePlansLag) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 12, 1 << 16);
  timed.input.wire.reduces_in_background = false;
  timed.links.shard = shared_memory_links(1e-9);
  ASSERT_EQ(timed.plan().sums().reduction_lag, 3);
  std::int64_t computed = 0, shares = 0, most = 0;
  const StepScript script = script_of(timed);
  for (const Instruction& instruction : script.instructions) {
    if (instruction.kind != Instruction::Kind::kWork) continue;
    if (instruction.what == std::string("backward")) ++computed;
    if (instruction.what == std::string("sum")) ++shares;
    most = std::max(most, computed - shares);
  }
  EXPECT_EQ(shares, 13);
  EXPECT_EQ(most, 4);  // the three units by which sums lag, and the unit that was computed last
  std::int64_t gathers = 0;
  for (std::size_t unit = 0; unit < 13; ++unit) gathers += timed.plan().gathers_in_step(unit);
  EXPECT_EQ(script.shard.calls, 13 + gathers);
  EXPECT_GT(script.shard.own_work_s, 0);
}

TEST(StepScript, OneCopyInSharedMemoryIsNotGathered) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 3);
  timed.input.placement = share_parameters(timed.input.placement);
  timed.links.shard = shared_memory_links(1e-9);
  const StepScript script = script_of(timed);
  EXPECT_TRUE(calls_of(script, "all_gather").empty());
  EXPECT_TRUE(calls_of(script, "publish").empty());
  EXPECT_EQ(calls_of(script, "barrier")[-1], 1);
}

TEST(StepScript, UpdatedValuesArePublishedWhereCopiesAreHeld) {
  for (const auto& [strategy, calls] : {std::pair(ShardingStrategy::kNoShard, 0),
                                        {ShardingStrategy::kShardOptimizer, 4},
                                        {ShardingStrategy::kShardGradients, 4},
                                        {ShardingStrategy::kFullShard, 0}}) {
    const StepScript script = script_of(timed_plan(strategy, {1, 4, 0, 0}, 3));
    EXPECT_EQ(
        std::ranges::count(script.calls, std::string("publish"), [](const WireCall& c) { return std::string(c.what); }),
        calls);
  }
}

TEST(StepScript, UnitsAreUpdatedInBackwardIfConfigured) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 3);
  timed.input.update.in_backward = true;
  const StepScript script = script_of(timed);
  const auto is = [&](const char* what) { return [=](const Instruction& i) { return i.what == std::string(what); }; };
  const auto first_update = std::ranges::find_if(script.instructions, is("update"));
  EXPECT_NE(std::find_if(first_update, script.instructions.end(), is("backward")), script.instructions.end());
  EXPECT_EQ(std::ranges::count_if(script.instructions, is("update")), 4);
  EXPECT_EQ(script.shard.calls, 4 + 2 * 4 + 1);  // gather, reduction and notes of each unit; a block's second gather
}

TEST(StepScript, RanksAgreeOnAUnitsNormsBeforeItIsUpdatedInBackward) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 3);
  timed.input.update.in_backward = timed.input.update.twice = true;
  const StepScript script = script_of(timed);
  const auto of_unit = [&](const char* what, int unit) {
    return std::ranges::find_if(script.instructions,
                                [=](const Instruction& i) { return i.what == std::string(what) && i.unit == unit; });
  };
  EXPECT_EQ(calls_of(script, "layer norms").size(), 4u);
  for (int unit = 0; unit < 4; ++unit) {
    EXPECT_EQ(calls_of(script, "layer norms")[unit], 1) << unit;
    EXPECT_LT(of_unit("backward", unit), of_unit("update", unit)) << unit;
  }
  EXPECT_LT(of_unit("update", 3), of_unit("backward", 0)) << "the last unit is updated while backward goes on";
  EXPECT_EQ(calls_of(script, "agree").size(), 1u);
}

TEST(StepScript, UnitsWithoutGradientsAreReducedToo) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 3);
  std::erase_if(timed.profile.entries, [](const ProfileEntry& e) { return e.unit == "blocks.1"; });
  EXPECT_EQ(calls_of(script_of(timed), "reduce").size(), 4u);
  timed.input.units[2].groups[0].trainable = false;
  EXPECT_EQ(calls_of(script_of(timed), "reduce").size(), 3u);
}

TEST(StepScript, TransportTakesNoMoreThanAllOfTheCores) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 3);
  timed.links.shard = links_of(1e-9);
  for (const auto& [cpu_s_per_byte, load] : {std::pair(0.0, 0.0), {2.5e-10, 0.25}, {1e-8, 1.0}}) {
    timed.links.shard.cpu_s_per_byte = cpu_s_per_byte;
    for (const WireCall& call : script_of(timed).calls)
      EXPECT_DOUBLE_EQ(call.load, call.channel == Channel::kWorld ? 0 : load);
  }
}

TEST(StepScript, CostsWithoutATimeAreListed) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 3);
  EXPECT_TRUE(script_of(timed).left_out.empty());
  timed.input.tiers.parameters.tier = Tier::kNvme;
  EXPECT_EQ(script_of(timed).left_out.size(), 1u);
}

TEST(StepScript, UnitsThatTheProfileDoesNotTimeAreListed) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 3);
  std::erase_if(timed.profile.entries, [](const ProfileEntry& entry) { return entry.unit == "blocks.1"; });
  const std::vector<std::string> left_out = script_of(timed).left_out;
  ASSERT_EQ(left_out.size(), 1u);
  EXPECT_NE(left_out[0].find("compute of blocks.1, of which the profile has no times"), std::string::npos)
      << left_out[0];
}

TEST(StepScript, StepOfTooManyCallsIsRefused) {
  TimedPlan timed = timed_plan(ShardingStrategy::kFullShard, {1, 4, 0, 0}, 3);
  timed.input.wire.accumulation = std::int64_t{1} << 40;
  EXPECT_EQ(exit_code_of(script_of_step(timed.plan(), timed.profile, timed.links).status()), ExitCode::kUsage);
}

}  // namespace
}  // namespace tessera::testing
