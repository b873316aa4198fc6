// A step tells where its time went: seconds without data, FLOP, and latencies by unit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <map>
#include <string>
#include <thread>
#include <tuple>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace step_times_test {

using std::chrono::milliseconds;

constexpr double kPause = 0.1;  // seconds
void pause() { std::this_thread::sleep_for(milliseconds(100)); }

TEST(StepTimes, APauseBeforeForwardIsAWaitForData) {
  on_each_placement(2, [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy);
    session.engine.time_data();
    for (std::size_t i = 0; i < 2; ++i) session.train(i);
    pause();
    const StepResult waited = session.train(2);
    EXPECT_GE(waited.data_seconds, kPause);
    EXPECT_LE(waited.data_seconds, waited.seconds);
    const at::Tensor loss = session.loss(3);
    pause();  // computing with what forward made
    session.engine.backward(loss);
    while (!session.engine.step_is_due()) session.engine.backward(session.loss(3));
    pause();  // between backward and step
    const StepResult computed = session.engine.step();
    EXPECT_GE(computed.seconds, 2 * kPause);
    EXPECT_LE(computed.data_seconds + 2 * kPause, computed.seconds);
  });
}

TEST(StepTimes, APauseBetweenMicrobatchesIsAWaitForData) {
  on_each_placement(
      2,
      [](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy);
        session.engine.time_data();
        for (std::size_t i = 0; i < 2; ++i) session.train(i);
        session.engine.backward(session.loss(0));
        pause();
        session.engine.backward(session.loss(1));
        EXPECT_GE(session.engine.step().data_seconds, kPause);
      },
      [](Strategy& strategy) { strategy.gradient_accumulation = 2; });
}

TEST(StepTimes, WhereNobodyWatchesOperatorsTheWaitIsMeasuredWhenAskedFor) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kNoShard));
    for (std::size_t i = 0; i < 2; ++i) EXPECT_TRUE(std::isnan(session.train(i).data_seconds));
    session.engine.time_data();
    session.train(2);
    EXPECT_GT(session.train(3).data_seconds, 0);
  });
}

TEST(StepTimes, AnotherThreadsForwardEndsTheWaitWithBackwardAtTheLatest) {
  const auto body = [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy);
    session.engine.time_data();
    session.train(0);
    at::Tensor loss;
    std::thread([&] { loss = session.loss(1); }).join();
    session.engine.backward(loss);
    const StepResult result = session.engine.step();
    EXPECT_GT(result.data_seconds, 0);
    EXPECT_LE(result.data_seconds, result.seconds);
  };
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) { body(mesh, strategy_for(ShardingStrategy::kNoShard)); });
}

// Blocks of Tiny are two products: width x hidden and hidden x width. The head is one. Forward makes each once, and
// backward twice.
TEST(StepTimes, FlopAreThoseOfTheProductsOfForwardAndBackward) {
  const TinyOptions sizes;
  on_each_placement(2, [&](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy);
    const std::int64_t tokens = rows_of(session.batches[0].tokens, mesh).numel();
    const std::int64_t forward =
        2 * tokens * (sizes.blocks * 2 * sizes.width * sizes.hidden + sizes.width * sizes.vocab);
    for (std::size_t i = 0; i < 3; ++i) {
      const StepResult result = session.train(i);
      EXPECT_EQ(result.flop, 3 * forward * static_cast<std::int64_t>(session.microbatches)) << "step " << i;
      EXPECT_DOUBLE_EQ(result.tflops(), static_cast<double>(result.flop) / result.seconds * 1e-12);
    }
  });
}

// The first product of a block is made again. The second is left before it is made, since nothing needs its result.
TEST(StepTimes, FlopOfWhatIsComputedAgainCount) {
  const TinyOptions sizes{.recompute = true};
  const auto body = [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard), sizes);
    const std::int64_t tokens = rows_of(session.batches[0].tokens, mesh).numel();
    const std::int64_t blocks = 2 * tokens * sizes.blocks * 2 * sizes.width * sizes.hidden;
    const std::int64_t head = 2 * tokens * sizes.width * sizes.vocab;
    EXPECT_EQ(session.train(0).flop,
              (3 * blocks + blocks / 2 + 3 * head) * static_cast<std::int64_t>(session.microbatches));
  };
  run_ranks({.ranks = 2}, body);
}

TEST(StepTimes, WhatEvaluateComputesIsNotAStepsFlop) {
  const auto body = [](const Mesh& mesh) {
    const Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    Session evaluated(mesh, strategy);
    const std::vector<int> batches = {0, 1};
    evaluated.engine.evaluate(batches, [&](int i) { return evaluated.loss(static_cast<std::size_t>(i)); });
    const std::int64_t flop = evaluated.train(0).flop;
    EXPECT_GT(flop, 0);
    EXPECT_EQ(flop, Session(mesh, strategy).train(0).flop);
  };
  run_ranks({.ranks = 2}, body);
}

TEST(StepTimes, MfuIsTheShareOfThePeak) {
  const auto body = [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kNoShard));
    EXPECT_TRUE(std::isnan(session.train(0).mfu()));  // nobody knows the peak of a CPU
    session.engine.set_peak_tflops(0.5);
    const StepResult result = session.train(1);
    EXPECT_EQ(result.peak_tflops, 0.5);
    EXPECT_DOUBLE_EQ(result.mfu(), result.tflops() / 0.5);
    EXPECT_THAT(usage_error_of([&] { session.engine.set_peak_tflops(0); }),
                ::testing::HasSubstr("wants a number above 0"));
  };
  run_ranks({.ranks = 1}, body);
}

// Gathers and reductions of the steps after time_calls, as traffic counts them.
TEST(StepTimes, EachGatherAndReductionOfAUnitIsTimed) {
  on_placements(kInMemory, 2, [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy);
    session.train(0);
    EXPECT_TRUE(session.engine.latencies().empty());
    const TrafficCounts before = session.engine.traffic();
    session.engine.time_calls();
    for (std::size_t i = 0; i < 3; ++i) session.train(i);
    const TrafficCounts after = session.engine.traffic();
    std::map<std::string, std::int64_t> counts;
    for (const CallLatency& each : session.engine.latencies()) {
      counts[each.call] += each.count;
      EXPECT_THAT(session.engine.unit_names(), ::testing::Contains(each.unit));
      EXPECT_GT(each.p50, 0) << each.call << " " << each.unit;
      EXPECT_LE(each.p50, each.p95);
      EXPECT_LE(each.p95, each.p99);
      EXPECT_LE(each.p99, each.max);
    }
    EXPECT_EQ(counts["reduce"], after.reductions - before.reductions);
    // A gather that began ahead of time_calls is not counted, nor is one that is under way now.
    EXPECT_LE(counts["gather"], after.gathers > 0 ? after.gathers - before.gathers : counts["gather"]);
    EXPECT_GE(counts["gather"] + static_cast<std::int64_t>(session.engine.unit_names().size()),
              after.gathers - before.gathers);
  });
}

}  // namespace step_times_test
}  // namespace tessera::testing
