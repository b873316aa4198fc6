// Tests that a step reports how its time was spent: seconds without data, FLOP, latencies by unit, and ranges for a
// profiler.

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/span.h"
#include "tests/support/limits/patience.h"
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
    pause();  // this pause stands for computing with forward's results
    session.engine.backward(loss);
    while (!session.engine.step_is_due()) session.engine.backward(session.loss(3));
    pause();  // this pause lies between backward and step
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

// A block of Tiny makes two products: width x hidden and hidden x width. The head makes one product. Forward makes each
// product once, and backward makes it twice.
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

// The first product of a block is computed again. Recomputation stops before the second product, since its result is
// not needed.
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
    EXPECT_TRUE(std::isnan(session.train(0).mfu()));  // the peak of a CPU is not known
    session.engine.set_peak_tflops(0.5);
    const StepResult result = session.train(1);
    EXPECT_EQ(result.peak_tflops, 0.5);
    EXPECT_DOUBLE_EQ(result.mfu(), result.tflops() / 0.5);
    EXPECT_THAT(usage_error_of([&] { session.engine.set_peak_tflops(0); }),
                ::testing::HasSubstr("wants a number above 0"));
  };
  run_ranks({.ranks = 1}, body);
}

// After time_calls, Engine::latencies counts all reductions that Engine::traffic counts, and nearly all gathers.
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
    // A gather that began before time_calls is not counted. A gather that is under way now is not counted either.
    EXPECT_LE(counts["gather"], after.gathers > 0 ? after.gathers - before.gathers : counts["gather"]);
    EXPECT_GE(counts["gather"] + static_cast<std::int64_t>(session.engine.unit_names().size()),
              after.gathers - before.gathers);
  });
}

constexpr SyncType kOuterSteps[] = {SyncType::kLocalSgd, SyncType::kDiloco, SyncType::kStreamingDiloco};

/// Returns a strategy for two replicas of one rank each, with an outer step after every second step.
Strategy with_outer_steps(SyncType type) {
  Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
  strategy.mesh = {2, 1};
  strategy.sync.type = type;
  strategy.sync.every = 2;
  if (type == SyncType::kStreamingDiloco) strategy.sync.fragments = 1;
  return strategy;
}

// A replica that reaches an outer step waits there for a replica that is late.
TEST(StepTimes, WaitInAnOuterStepIsCommunication) {
  const std::chrono::milliseconds late = patient(milliseconds(300));
  for (const SyncType type : kOuterSteps) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, with_outer_steps(type));
      session.train(0);
      if (mesh.rank() == 1) std::this_thread::sleep_for(late);
      double seconds = session.train(1).communication_seconds;
      seconds += session.train(2).communication_seconds;  // a fragment arrives some steps later
      if (mesh.rank() == 0) {
        EXPECT_GE(seconds, 0.5 * std::chrono::duration<double>(late).count());
      }
    });
  }
}

/// Observes ranges of all threads while it exists, as an attached profiler does. There is only one Observer at a time.
class Observer {
 public:
  Observer(at::RecordFunctionCallback::StartCallback begin, at::RecordFunctionCallback::EndCallback end) {
    const std::unordered_set<at::RecordScope> scopes = {at::RecordScope::USER_SCOPE};
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(begin, end).scopes(scopes));
  }
  ~Observer() { at::removeCallback(handle_); }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

 private:
  at::CallbackHandle handle_;
};

/// The profiler ranges that the observers of all ranks have seen.
struct Seen {
  std::mutex mutex;
  std::map<std::string, std::int64_t> begun;  ///< [name]: number of ranges that began
  std::int64_t ended = 0, out_of_order = 0;
};
Seen seen;
thread_local std::vector<std::string> open_ranges;

std::unique_ptr<at::ObserverContext> note_begin(const at::RecordFunction& range) {
  const std::lock_guard lock(seen.mutex);
  ++seen.begun[range.name()];
  open_ranges.emplace_back(range.name());
  return nullptr;
}

void note_end(const at::RecordFunction& range, at::ObserverContext*) {
  const std::lock_guard lock(seen.mutex);
  ++seen.ended;
  if (open_ranges.empty() || open_ranges.back() != range.name()) ++seen.out_of_order;
  if (!open_ranges.empty()) open_ranges.pop_back();
}

/// Returns the number of ranges whose name began with `beginning`.
std::int64_t ranges_of(const std::string& beginning) {
  std::int64_t count = 0;
  for (const auto& [name, times] : seen.begun) count += name.starts_with(beginning) ? times : 0;
  return count;
}

// Each call that traffic counts has one range with the unit's name. That range ends before the range around it.
TEST(StepTimes, ProfilerSeesARangeForEachGatherReductionAndUpdate) {
  constexpr std::int64_t kRanks = 2, kSteps = 3;
  for (const Placed& placed : kOnePerPlacement) {
    SCOPED_TRACE(name_of(placed));
    seen.begun.clear();
    seen.ended = seen.out_of_order = 0;
    std::atomic<std::int64_t> gathers = 0, reductions = 0, backwards = 0;
    std::vector<std::string> units;
    {
      const Observer profiler(&note_begin, &note_end);
      run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(placed));
        for (std::size_t i = 0; i < kSteps; ++i) session.train(i);
        const TrafficCounts traffic = session.engine.traffic();
        gathers += traffic.gathers;
        reductions += traffic.reductions;
        backwards += kSteps * static_cast<std::int64_t>(session.microbatches);
        if (mesh.rank() == 0) units = session.engine.unit_names();
      });
    }
    EXPECT_EQ(ranges_of("all_gather "), gathers);
    EXPECT_EQ(ranges_of("reduce "), reductions);
    EXPECT_EQ(seen.begun["backward"], backwards);
    EXPECT_EQ(seen.begun["agree"], kRanks * kSteps);
    EXPECT_EQ(seen.begun["update"], kRanks * kSteps);
    for (const std::string& unit : units) {
      EXPECT_EQ(seen.begun["reduce " + unit], backwards) << unit;
      EXPECT_GE(seen.begun["update " + unit], kRanks * kSteps) << unit;
      EXPECT_EQ(seen.begun["all_gather " + unit] > 0, gathers > 0) << unit;
    }
    EXPECT_EQ(seen.ended, ranges_of(""));
    EXPECT_EQ(seen.out_of_order, 0);
  }
}

// Sums over replicas are counted as reductions, and each is shown as a reduction.
TEST(StepTimes, ProfilerSeesARangeForEachSumOfAnOuterStep) {
  for (const SyncType type : kOuterSteps) {
    seen.begun.clear();
    seen.ended = seen.out_of_order = 0;
    std::atomic<std::int64_t> reductions = 0, inner = 0;
    std::vector<std::string> units;
    {
      const Observer profiler(&note_begin, &note_end);
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        Session session(mesh, with_outer_steps(type));
        session.train(0);
        inner += 3 * session.engine.traffic().reductions;
        for (std::size_t i = 1; i < 3; ++i) session.train(i);
        reductions += session.engine.traffic().reductions;
        if (mesh.rank() == 0) units = session.engine.unit_names();
      });
    }
    EXPECT_GT(reductions, inner) << "no sum over replicas was made";
    EXPECT_EQ(ranges_of("reduce "), reductions);
    for (const std::string& unit : units) EXPECT_GT(seen.begun["wait " + unit], 0) << unit;
    EXPECT_EQ(seen.out_of_order, 0);
  }
}

TEST(StepTimes, WithoutAProfilerASpanIsNoRange) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    const Session session(mesh, strategy_for(ShardingStrategy::kNoShard));
    ASSERT_NE(Trace::listener(), nullptr);
    EXPECT_EQ(Trace::listener()->begin("agree", ""), nullptr);
    const Observer profiler(&note_begin, &note_end);
    void* const range = Trace::listener()->begin("agree", "");
    ASSERT_NE(range, nullptr);
    Trace::listener()->end(range);
  });
}

// Gathers run inside an observer of operators, so the exceptions of the test's observer pass through that observer,
// too.
TEST(StepTimes, ObserverThatThrowsEndsNothing) {
  const auto values = [] {
    return of_rank_zero({.ranks = 2},
                        [&](const Mesh& mesh) { return trained(mesh, strategy_for(ShardingStrategy::kFullShard), 1); });
  };
  static std::atomic<int> thrown = 0;
  const Values wanted = values();
  const Observer profiler(
      [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
        ++thrown;
        throw std::runtime_error("at its begin");
      },
      [](const at::RecordFunction&, at::ObserverContext*) {
        ++thrown;
        throw std::runtime_error("at its end");
      });
  EXPECT_TRUE(all_same_bits(values(), wanted));
  EXPECT_GT(thrown, 0);
}

}  // namespace step_times_test
}  // namespace tessera::testing
