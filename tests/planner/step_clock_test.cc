// Tests the clock that simulates scripts of ranks: how work and calls overlap and slow each other down.

#include "planner/step_clock.h"

#include <gtest/gtest.h>

#include <array>

#include "runtime/base/status.h"

namespace tessera {
namespace {

/// A script that a test builds by hand.
struct Script {
  StepScript script;

  Script& work(double seconds, Spending spending = Spending::kCompute) {
    script.instructions.push_back({Instruction::Kind::kWork, spending, seconds, -1, "work", -1});
    return *this;
  }
  Script& post(Channel channel, double latency_s, double transfer_s, double load = 0, double drag = 0) {
    script.calls.push_back({channel, {latency_s, transfer_s, 0}, load, drag, "call", -1});
    script.instructions.push_back(
        {Instruction::Kind::kPost, Spending::kCompute, 0, static_cast<int>(script.calls.size()) - 1, "call", -1});
    return *this;
  }
  Script& wait(int call, Spending spending = Spending::kGather) {
    script.instructions.push_back({Instruction::Kind::kWait, spending, 0, call, "wait", -1});
    return *this;
  }
};

RankTimes alone(const Script& script) {
  StepClock clock(script.script, 1, 1);
  const double start_s = 0;
  EXPECT_TRUE(clock.play({&start_s, 1}).ok());
  return clock.times(0);
}

TEST(StepClock, CallGoesOnWhileItsRankWorks) {
  const RankTimes times = alone(Script().post(Channel::kGather, 1, 4).work(3).wait(0).work(1));
  EXPECT_EQ(times.end_s, 6);
  EXPECT_EQ(times.spent(Spending::kCompute), 4);
  EXPECT_EQ(times.spent(Spending::kGather), 2);
}

TEST(StepClock, CallsOfOneChannelRunOneAfterTheOther) {
  EXPECT_EQ(alone(Script().post(Channel::kGather, 0, 2).post(Channel::kGather, 0, 3).wait(1)).end_s, 5);
}

TEST(StepClock, GathersAndReductionsShareTheWire) {
  const Script both = Script().post(Channel::kGather, 0, 4).post(Channel::kReduce, 0, 2);
  EXPECT_EQ(alone(Script(both).wait(1)).end_s, 4);  // both calls have half the speed
  EXPECT_EQ(alone(Script(both).wait(0)).end_s, 6);  // then the other call has full speed
  EXPECT_EQ(alone(Script().post(Channel::kGather, 0, 4).post(Channel::kReplicate, 0, 2).wait(1).wait(0)).end_s, 4);
}

TEST(StepClock, LatenciesDoNotSlowEachOther) {
  EXPECT_EQ(alone(Script().post(Channel::kGather, 3, 0).post(Channel::kReduce, 3, 0).wait(0).wait(1)).end_s, 3);
  // Both latencies end at 1. Each call has half the speed from 1 to 5. The reduction sends all of its 2 s of bytes in
  // this time, and the gather sends 2 s of its 4 s. The rest of the gather ends at second 7.
  EXPECT_EQ(alone(Script().post(Channel::kGather, 1, 4).post(Channel::kReduce, 1, 2).wait(0).wait(1)).end_s, 7);
}

TEST(StepClock, BytesThatMoveTakeCoresFromWork) {
  const RankTimes times = alone(Script().post(Channel::kGather, 1, 4, 0.5).work(10));
  EXPECT_EQ(times.end_s, 12);  // 1 s of work is done in [0, 1], 2 s in [1, 5], and 7 s in [5, 12]
  EXPECT_EQ(times.spent(Spending::kCompute), 10);
  EXPECT_EQ(times.stretch_s, 2);
  EXPECT_EQ(alone(Script().post(Channel::kGather, 0, 4, 1).work(10)).end_s, 14);
  EXPECT_EQ(alone(Script().post(Channel::kGather, 0, 4, 1).post(Channel::kReplicate, 0, 4, 1).work(10)).end_s, 14);
}

/// Bytes are sent at half speed during work, even if one piece of work follows another, and at full speed afterwards.
TEST(StepClock, BytesMoveMoreSlowlyWhileARankWorks) {
  const Script script = Script().post(Channel::kGather, 0.25, 2, 0, /*drag=*/1).work(0.75).work(0.5).wait(0);
  EXPECT_DOUBLE_EQ(alone(script).end_s, 1.25 + (2 - 0.5));
  const Script all = Script().post(Channel::kGather, 0, 2, 0, 1).work(5).wait(0).work(1);
  EXPECT_DOUBLE_EQ(alone(all).end_s, 6);
  const Script waited = Script().work(1).post(Channel::kGather, 0, 2, 0, 1).wait(0);
  EXPECT_DOUBLE_EQ(alone(waited).end_s, 3);
}

/// Latency also grows during work. Latency does not use the wire, so a call that shares the wire does not wait for the
/// latency.
TEST(StepClock, CallsBeginLaterWhileARankWorks) {
  Script script = Script().post(Channel::kGather, 0.5, 1).post(Channel::kReduce, 0, 1.5).work(1.5).wait(1).wait(0);
  script.script.calls[0].cost.busy_latency_s = 2;
  // Seconds 0 to 1.5 contain the reduction and 3/4 of the latency. The rest of the latency ends at 1.625, and then the
  // gather's bytes are sent.
  EXPECT_DOUBLE_EQ(alone(script).end_s, 1.625 + 1);
  script.script.calls[0].cost.latency_s = 0;
  EXPECT_NEAR(alone(script).end_s, 1.5 + 1, 1e-9);
}

/// A call for which no rank waits continues after the end of the step.
TEST(StepClock, RankMayEndBeforeItsCallDoes) {
  const RankTimes times = alone(Script().post(Channel::kGather, 0, 10, 0.5, 1).work(1));
  EXPECT_DOUBLE_EQ(times.end_s, 1 / (1 - 0.25));  // at half speed, the call takes half of its share (0.5) of the cores
}

TEST(StepClock, WireIsBusyWhileAnyCallIsUnderWay) {
  const Script script = Script().post(Channel::kGather, 1, 2).work(5).post(Channel::kReduce, 0, 1).wait(0).wait(1);
  StepClock clock(script.script, 1, 1);
  const double start_s = 0;
  ASSERT_TRUE(clock.play({&start_s, 1}).ok());
  EXPECT_EQ(clock.busy_s(Axis::kShard, 0), 4);
  EXPECT_EQ(clock.busy_s(Axis::kReplicate, 0), 0);
}

TEST(StepClock, CallBeginsWhenTheLastRankOfItsGroupArrives) {
  // There are 2 x 2 ranks, with the shard groups {0, 1} and {2, 3} and the replicate groups {0, 2} and {1, 3}.
  const Script script = Script().work(1).post(Channel::kGather, 0, 1).wait(0).post(Channel::kReplicate, 0, 1).wait(1);
  StepClock clock(script.script, 2, 2);
  const std::array<double, 4> starts{0, 0, 0, 0}, work{1, 2, 3, 6};
  ASSERT_TRUE(clock.play(starts, [&](int rank, std::size_t) { return work[static_cast<std::size_t>(rank)]; }).ok());
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(clock.times(rank).end_s, 8) << rank;
  EXPECT_EQ(clock.times(0).spent(Spending::kGather),
            3 - 1 + 5);  // the first call ends at 3, and the rank waits until 8 for the second call
  EXPECT_EQ(clock.times(3).spent(Spending::kGather), 2);
}

TEST(StepClock, RanksMayBeginAtDifferentTimes) {
  const Script script = Script().post(Channel::kWorld, 1, 0).wait(0);
  StepClock clock(script.script, 1, 2);
  const std::array<double, 2> starts{5, 2};
  for (int again = 0; again < 2; ++again) {
    ASSERT_TRUE(clock.play(starts).ok());
    EXPECT_EQ(clock.times(0).end_s, 6);
    EXPECT_EQ(clock.times(1).spent(Spending::kGather), 4);
  }
}

TEST(StepClock, RanksThatWaitForeverAreAnError) {
  Script script = Script().post(Channel::kGather, 1, 1);
  script.script.instructions[0] = {Instruction::Kind::kWait, Spending::kGather, 0, 0, "wait", -1};
  StepClock clock(script.script, 1, 1);
  const double start_s = 0;
  EXPECT_EQ(exit_code_of(clock.play({&start_s, 1})), ExitCode::kInternal);
}

}  // namespace
}  // namespace tessera
