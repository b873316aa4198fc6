// A step tells where its time went: seconds without data, FLOP, and latencies by unit.

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
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

}  // namespace step_times_test
}  // namespace tessera::testing
