// Tests "sync": {"type": "backups"}: a step sums the gradients of the ranks that come first, and drops the gradients
// that come late.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "engine/detailed_plan.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tessera/error.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace backups_test {

using ::testing::HasSubstr;

constexpr int kRanks = 3;

Strategy synchronous(const Adjust& adjust = nullptr) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kShardOptimizer);
  strategy.host_sharing = true;
  strategy.gradient_clipping = 0.5;
  strategy.gradient_sync = GradientSync::kLastMicrobatch;
  if (adjust) adjust(strategy);
  return strategy;
}

Strategy with_backups(std::int64_t count, const Adjust& adjust = nullptr) {
  Strategy strategy = synchronous(adjust);
  strategy.sync.type = SyncType::kBackups;
  strategy.sync.backups = count;
  return strategy;
}

void sgd(Strategy& s) { s.optimizer = {.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0, .momentum = 0.9}; }

struct Ran {
  std::vector<StepResult> steps;  ///< the results of rank 0
  Values values;
};

Ran run(const Strategy& strategy, int ranks, TinyOptions model) {
  Ran result;
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy, model);
    std::vector<StepResult> steps;
    for (std::size_t i = 0; i < 5; ++i) steps.push_back(session.train(i));
    barrier(mesh);
    Values values = session.values();
    if (mesh.rank() == 0) result = {std::move(steps), std::move(values)};
    barrier(mesh);
  });
  return result;
}

TEST(Backups, CountOfZeroHasTheBitsOfASynchronousRun) {
  struct Case {
    const char* name;
    Adjust adjust;
    TinyOptions model = {};
    int ranks = kRanks;
  };
  const Case cases[] = {{"adamw", nullptr},
                        {"sgd", sgd},
                        {"two microbatches", [](Strategy& s) { s.gradient_accumulation = 2; }},
                        {"one rank", nullptr, {}, 1},
                        {"a tied head, frozen and unused blocks",
                         nullptr,
                         {.tied_head = true, .frozen_first_block = true, .unused_block = true}}};
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    const Ran wanted = run(synchronous(each.adjust), each.ranks, each.model);
    const Ran got = run(with_backups(0, each.adjust), each.ranks, each.model);
    for (std::size_t i = 0; i < wanted.steps.size(); ++i) {
      EXPECT_EQ(got.steps[i].step, wanted.steps[i].step);
      EXPECT_EQ(got.steps[i].loss, wanted.steps[i].loss) << i;
      EXPECT_EQ(got.steps[i].grad_norm, wanted.steps[i].grad_norm) << i;
      EXPECT_EQ(got.steps[i].lr, wanted.steps[i].lr) << i;
      EXPECT_EQ(got.steps[i].missed, 0);
      EXPECT_EQ(got.steps[i].dropped, 0);
    }
    EXPECT_TRUE(all_same_bits(got.values, wanted.values));
  }
}

/// Runs backward on the rows that rank `rank` of kRanks has, however many ranks there are.
void backward_of(Session& session, std::size_t step, int rank) {
  const Batch& batch = session.batches[step % session.batches.size()];
  const std::int64_t rows = batch.tokens.size(0) / kRanks;
  session.engine.backward(
      session.model->forward(batch.tokens.narrow(0, rank * rows, rows), batch.targets.narrow(0, rank * rows, rows)));
}

TEST(Backups, StepsWithoutTheLateRankHaveTheBitsOfARunWithoutIt) {
  constexpr std::size_t kSteps = 5;
  std::vector<double> wanted_losses;
  Values wanted;
  run_ranks({.ranks = kRanks - 1}, [&](const Mesh& mesh) {
    Session session(mesh, synchronous());
    std::vector<double> losses;
    for (std::size_t i = 0; i < kSteps; ++i) {
      backward_of(session, i, mesh.rank());
      losses.push_back(session.engine.step().loss);
    }
    Values values = session.values();
    if (mesh.rank() == 0) wanted = std::move(values), wanted_losses = losses;
    barrier(mesh);
  });
  std::atomic<int> done{0};
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Session session(mesh, with_backups(1));
    if (mesh.rank() == kRanks - 1) {
      backward_of(session, 0, mesh.rank());
      while (done.load() < kRanks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const StepResult late = session.engine.step();
      EXPECT_EQ(late.step, std::int64_t{kSteps});
      EXPECT_EQ(late.missed, std::int64_t{kSteps});
      EXPECT_EQ(late.dropped, 1);
      EXPECT_EQ(session.engine.steps_applied(), std::int64_t{kSteps});
    } else {
      std::vector<double> losses;
      for (std::size_t i = 0; i < kSteps; ++i) {
        backward_of(session, i, mesh.rank());
        const StepResult step = session.engine.step();
        EXPECT_EQ(step.step, static_cast<std::int64_t>(i) + 1);
        EXPECT_EQ(step.missed, 0);
        losses.push_back(step.loss);
      }
      EXPECT_EQ(losses, wanted_losses);
      ++done;
    }
    EXPECT_TRUE(all_same_bits(session.values(), wanted));
    barrier(mesh);
  });
}

TEST(Backups, EachStepHasTheRanksThatCameFirst) {
  constexpr std::int64_t kSteps = 12;
  std::vector<std::vector<StepResult>> results(kRanks);
  std::vector<Values> values(kRanks);
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    const auto rank = static_cast<std::size_t>(mesh.rank());
    Session session(mesh, with_backups(1));
    std::int64_t done = 0;
    while (done < kSteps) {
      session.engine.backward(session.loss(static_cast<std::size_t>(done)));
      if (mesh.rank() == kRanks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      results[rank].push_back(session.engine.step());
      const StepResult& last = results[rank].back();
      EXPECT_EQ(last.step, done + std::max<std::int64_t>(1, last.missed));
      done = last.step;
    }
    EXPECT_EQ(done, kSteps);
    barrier(mesh);
    values[rank] = session.values();
    barrier(mesh);
  });
  std::map<std::int64_t, int> parts;
  std::map<std::int64_t, std::vector<double>> losses;
  std::int64_t late = 0, dropped = 0;
  for (const std::vector<StepResult>& of_rank : results) {
    for (const StepResult& step : of_rank) {
      dropped = std::max(dropped, step.dropped);
      if (step.missed > 0) {
        ++late;
        continue;
      }
      ++parts[step.step];
      losses[step.step].push_back(step.loss);
    }
  }
  for (std::int64_t step = 1; step <= kSteps; ++step) {
    EXPECT_EQ(parts[step], kRanks - 1) << step;
    for (const double loss : losses[step]) EXPECT_EQ(loss, losses[step].front()) << step;
  }
  EXPECT_GT(late, 0);
  EXPECT_EQ(dropped, late);
  for (const Values& each : values) EXPECT_TRUE(all_same_bits(each, values[0]));
}

TEST(Backups, RanksThatHaveLeftAreMissedOnlyIfTooFewAreLeft) {
  const auto error_where_leave = [](int leaving) {
    return error_of([&] {
      run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
        Session session(mesh, with_backups(1));
        barrier(mesh);
        if (mesh.rank() >= kRanks - leaving) return;
        for (std::size_t i = 0; i < 4; ++i) session.train(i);
      });
    });
  };
  EXPECT_EQ(error_where_leave(1), "");
  EXPECT_THAT(error_where_leave(2), HasSubstr("has left"));
}

TEST(Backups, CheckpointResumesWithTheSameBits) {
  const TestFolder folder;
  const Strategy strategy = with_backups(0);
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Values wanted;
    {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < 3; ++i) session.train(i);
      save_checkpoint(session.engine, folder.path());
      for (std::size_t i = 3; i < 6; ++i) session.train(i);
      barrier(mesh);
      wanted = session.values();
      barrier(mesh);
    }
    Session session(mesh, strategy);
    load_checkpoint(session.engine, folder.path());
    for (std::size_t i = 3; i < 6; ++i) EXPECT_EQ(session.train(i).step, static_cast<std::int64_t>(i) + 1);
    barrier(mesh);
    EXPECT_TRUE(all_same_bits(session.values(), wanted));
    barrier(mesh);
  });
}

// The run saves a checkpoint when one rank has missed steps that the others have made.
TEST(Backups, SaveBringsALateRankToTheStepOfTheOthers) {
  const TestFolder folder;
  std::atomic<int> done{0};
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Session session(mesh, with_backups(1));
    if (mesh.rank() != 1) {
      for (std::size_t i = 0; i < 3; ++i) session.train(i);
      ++done;
    } else {
      while (done.load() < kRanks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    save_checkpoint(session.engine, folder.path());
    const StepResult next = session.train(3);
    EXPECT_EQ(next.step, 4);
    barrier(mesh);
    EXPECT_EQ(session.engine.steps_applied(), 4);
    barrier(mesh);
  });
}

// Ranks wait for each other when rank 1 has missed steps, and the next step sums the gradients of rank 1 and rank 0.
TEST(Backups, RankThatWasLateMakesTheNextStepWithTheCountsOfTheOthers) {
  constexpr std::int64_t kSamples = 8, kSteps = 3;
  const TestFolder folder;
  Strategy strategy = with_backups(1);
  strategy.lr_schedule = {.type = LrScheduleType::kLinear, .total_steps = 10};
  const std::function<void(Engine&)> meetings[] = {[&](Engine& engine) { save_checkpoint(engine, folder.path()); },
                                                   [](Engine& engine) { Gathered(engine, Gathered::kWrite).close(); }};
  for (const auto& meet : meetings) {
    std::atomic<int> done{0}, ended{0};
    std::vector<double> rates(kRanks);
    run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      const auto train = [&](std::size_t i) {
        session.engine.backward(session.loss(i), {.samples = kSamples});
        return session.engine.step();
      };
      const auto wait_for = [](const std::atomic<int>& count) {
        while (count.load() < kRanks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      };
      if (mesh.rank() != 1) {
        for (std::size_t i = 0; i < kSteps; ++i) train(i);
        ++done;
      } else {
        wait_for(done);
      }
      meet(session.engine);
      EXPECT_EQ(session.engine.steps_applied(), kSteps);
      EXPECT_EQ(session.engine.samples_seen(), kSteps * (kRanks - 1) * kSamples);
      if (mesh.rank() == 2) wait_for(ended);
      const StepResult next = train(kSteps);
      EXPECT_EQ(next.step, kSteps + 1);
      EXPECT_EQ(next.missed, mesh.rank() == 2 ? 1 : 0);
      rates[static_cast<std::size_t>(mesh.rank())] = next.lr;
      ++ended;
      barrier(mesh);
      EXPECT_EQ(session.engine.steps_applied(), kSteps + 1);
      EXPECT_EQ(session.engine.samples_seen(), (kSteps + 1) * (kRanks - 1) * kSamples);
      barrier(mesh);
    });
    EXPECT_EQ(rates[1], rates[0]);
    EXPECT_LT(rates[1], strategy.optimizer.lr);
  }
}

TEST(Backups, MemoryEqualsThePlan) {
  run_ranks({.ranks = kRanks}, [](const Mesh& mesh) {
    const Strategy strategy = with_backups(1);
    Session session(mesh, strategy);
    const StepResult result = session.train(0);
    EXPECT_EQ(result.planned, result.allocated);
    EXPECT_EQ(plan_memory(*session.model, strategy, mesh.topology()).use, result.planned);
    EXPECT_THAT(plan_in_detail(*session.model, strategy, mesh.topology(), {}).to_table(),
                HasSubstr("backups: a step sums the gradients of the first 2 of 3 ranks"));
    barrier(mesh);
  });
}

TEST(Backups, OtherLearningRatesOnSomeRanksAreRefused) {
  Strategy strategy = with_backups(0);
  strategy.lr_schedule.type = LrScheduleType::kManual;
  EXPECT_THAT(error_of([&] {
                run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
                  Session session(mesh, strategy);
                  session.engine.set_lr(0.1 * (1 + mesh.rank()));
                  session.train(0);
                });
              }),
              HasSubstr("have different learning rates or options"));
}

TEST(Backups, WhatDoesNotGoTogetherIsRefusedByName) {
  const auto error_with = [](const std::string& sync, const std::string& more) {
    return error_of([&] { Strategy::from_json("{\"sync\": " + sync + more + "}"); });
  };
  const std::string backups = R"({"type": "backups", "count": 1})", sharded = R"(, "strategy": "SHARD_OPTIMIZER")";
  EXPECT_EQ(error_with(backups, sharded), "");
  EXPECT_THAT(error_with(backups, ""), HasSubstr("backups needs \"strategy\" \"SHARD_OPTIMIZER\""));
  for (const char* more : {R"(, "ema": {"decay": 0.9})", R"(, "on_spike": {"action": "skip"})",
                           R"(, "lr_schedule": {"base_batch_size": 8})", R"(, "durable": {"every": 1, "dir": "d"})"})
    EXPECT_THAT(error_with(backups, sharded + more), HasSubstr("backups cannot stand beside")) << more;
  EXPECT_THAT(error_with(R"({"type": "asynchronous", "count": 1})", sharded), HasSubstr("sync.type backups"));
  EXPECT_THAT(error_with(R"({"type": "backups", "max_staleness": 1})", sharded), HasSubstr("sync.type asynchronous"));
  EXPECT_THAT(
      error_of([] { run_ranks({.ranks = 2}, [](const Mesh& mesh) { const Session session(mesh, with_backups(2)); }); }),
      HasSubstr("/sync/count: a step would wait for none of 2 ranks"));
}

}  // namespace backups_test
}  // namespace tessera::testing
