// Tests "sync": {"type": "asynchronous"}: ranks push gradients to shards that all ranks own together, and do not wait
// for each other. The recorded order is repeated by ranks, and by plain LibTorch on one thread, and gives the same
// bits.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "runtime/comm/mesh_groups.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tessera/error.h"
#include "tessera/sync_batch_norm.h"
#include "tests/engine/asynchronous/order_oracle.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/limits/long_tests.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace asynchronous_test {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kRanks = 3;

void sgd(Strategy& s) { s.optimizer = {.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0, .momentum = 0.9}; }

Strategy asynchronous(const Adjust& adjust = nullptr) {
  Strategy strategy = tiny_strategy(ShardingStrategy::kShardOptimizer);
  strategy.host_sharing = true;
  strategy.gradient_clipping = 0;
  strategy.sync.type = SyncType::kAsynchronous;
  if (adjust) adjust(strategy);
  return strategy;
}

struct Ran {
  std::vector<std::vector<double>> losses;  ///< one for each rank and step
  std::vector<std::vector<StepResult>> steps;
  Values values;  ///< the values after all ranks have pushed
};

/// Trains `steps` steps on ranks that are threads.
Ran run(const Strategy& strategy, std::size_t steps, const OrderOption& option = {}) {
  Ran result;
  result.losses.resize(kRanks);
  result.steps.resize(kRanks);
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy, option.model);
    const auto rank = static_cast<std::size_t>(mesh.rank());
    for (std::size_t i = 0; i < steps; ++i) {
      result.steps[rank].push_back(make_step(session, option, i));
      result.losses[rank].push_back(result.steps[rank].back().loss);
    }
    barrier(mesh);
    Values values = session.values();
    if (rank == 0) result.values = std::move(values);
  });
  return result;
}

/// Returns the pushes and pulls of each shard in order, as rank and kind.
auto by_shard(const std::vector<OrderLine>& lines) {
  std::map<std::tuple<std::string, std::size_t, int>, std::vector<std::pair<int, bool>>> shards;
  for (const OrderLine& line : lines) shards[{line.unit, line.group, line.owner}].push_back({line.rank, line.is_push});
  return shards;
}

TEST(Asynchronous, RecordedRunEqualsPlainLibTorchThatPlaysItsOrder) {
  at::set_num_threads(1);
  for (const OrderOption& option : order_options()) {
    SCOPED_TRACE(option.name);
    const TestFolder folder;
    Strategy strategy = asynchronous(option.adjust);
    strategy.sync.asynchronous.record_order = folder / "order.jsonl";
    const Ran got = run(strategy, 6, option);
    OrderOracle oracle(strategy, kRanks, option);
    oracle.play(read_lines(folder / "order.jsonl"));
    EXPECT_EQ(got.losses, oracle.losses());
    EXPECT_TRUE(all_same_bits(got.values, oracle.values()));
    EXPECT_EQ(oracle.clipped() > 0, strategy.gradient_clipping > 0 || strategy.gradient_clip_value > 0);
  }
}

TEST(Asynchronous, PlayedOrderGivesTheRecordedRunsBitsAndOrder) {
  for (const OrderOption& option : order_options()) {
    SCOPED_TRACE(option.name);
    const TestFolder folder;
    Strategy strategy = asynchronous(option.adjust);
    strategy.sync.asynchronous.record_order = folder / "order.jsonl";
    const Ran first = run(strategy, 5, option);
    strategy.sync.asynchronous.play_order = folder / "order.jsonl";
    strategy.sync.asynchronous.record_order = folder / "again.jsonl";
    const Ran second = run(strategy, 5, option);
    EXPECT_EQ(first.losses, second.losses);
    EXPECT_TRUE(all_same_bits(first.values, second.values));
    EXPECT_EQ(by_shard(read_lines(folder / "order.jsonl")), by_shard(read_lines(folder / "again.jsonl")));
  }
}

TEST(Asynchronous, RandomOrdersEqualPlainLibTorch) {
  at::set_num_threads(1);
  const TestFolder folder;
  std::int64_t oldest = 0;
  const std::uint64_t seeds = tests_are_long() ? 200 : 40;
  std::uint64_t equal = 0;
  for (std::uint64_t seed = 0; seed < seeds; ++seed) {
    const OrderOption& option = order_options()[seed % order_options().size()];
    SCOPED_TRACE(std::string(option.name) + ", seed " + std::to_string(seed));
    Strategy strategy = asynchronous(option.adjust);
    const std::string recorded = folder / option.name;
    if (seed < order_options().size()) {  // one record for each option: nothing else decides what a rank does
      strategy.sync.asynchronous.record_order = recorded;
      run(strategy, 4, option);
      strategy.sync.asynchronous.record_order.clear();
    }
    const auto order = shuffled(read_lines(recorded), kRanks, seed);
    write_lines(folder / "random.jsonl", kRanks, order);
    strategy.sync.asynchronous.play_order = folder / "random.jsonl";
    const Ran got = run(strategy, 4, option);
    OrderOracle oracle(strategy, kRanks, option);
    oracle.play(counted(order));  // counts versions anew, since the lines were shuffled
    const bool is_equal = all_same_bits(got.values, oracle.values());
    EXPECT_EQ(got.losses, oracle.losses());
    EXPECT_TRUE(is_equal);
    if (is_equal && got.losses == oracle.losses()) ++equal;
    for (const auto& steps : got.steps) {
      for (const StepResult& step : steps) oldest = std::max(oldest, step.staleness_max);
    }
  }
  std::printf("%llu of %llu random orders have the bits of plain LibTorch\n", static_cast<unsigned long long>(equal),
              static_cast<unsigned long long>(seeds));
  EXPECT_GT(oldest, kRanks - 1) << "some rank was far behind";
}

TEST(Asynchronous, AgeIsTheNumberOfUpdatesByOtherRanks) {
  const TestFolder folder;
  Strategy strategy = asynchronous(sgd);
  strategy.sync.asynchronous.max_staleness = 0;
  const Ran got = run(strategy, 3);
  for (int rank = 0; rank < kRanks; ++rank) {  // all ranks pull one version, and then push in rank order
    for (const StepResult& step : got.steps[static_cast<std::size_t>(rank)]) {
      EXPECT_EQ(step.staleness_max, rank);
      EXPECT_EQ(step.staleness_mean, rank);
      EXPECT_GT(step.ages.total(), 0);
      EXPECT_EQ(step.ages.counts[static_cast<std::size_t>(rank)], step.ages.total());
    }
  }
}

TEST(Asynchronous, StalenessOfTheEngineIsThatOfAllItsSteps) {
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Session session(mesh, asynchronous(sgd));
    AgeHistogram all;
    for (std::size_t i = 0; i < 4; ++i) all.add(session.train(i).ages);
    EXPECT_GT(all.total(), 0);
    EXPECT_EQ(session.engine.staleness().counts, all.counts);
    barrier(mesh);
  });
}

TEST(AgeHistogram, AgesFallIntoTheirBuckets) {
  const std::pair<std::int64_t, const char*> buckets[] = {{0, "0"},      {7, "7"},      {8, "8-15"}, {15, "8-15"},
                                                          {16, "16-31"}, {63, "32-63"}, {64, "64+"}, {1 << 20, "64+"}};
  for (const auto& [age, name] : buckets) {
    AgeHistogram ages;
    ages.add(age);
    EXPECT_EQ(ages.total(), 1) << age;
    for (std::size_t bucket = 0; bucket < AgeHistogram::kBuckets; ++bucket)
      EXPECT_EQ(ages.counts[bucket], AgeHistogram::name_of(bucket) == name ? 1 : 0) << age << " in " << bucket;
  }
}

TEST(Asynchronous, RunsWithoutStalenessHaveEqualBits) {
  for (const Adjust& adjust : {Adjust(sgd), Adjust(nullptr)}) {
    Strategy strategy = asynchronous(adjust);
    strategy.sync.asynchronous.max_staleness = 0;
    const Ran first = run(strategy, 6), second = run(strategy, 6);
    EXPECT_EQ(first.losses, second.losses);
    EXPECT_TRUE(all_same_bits(first.values, second.values));
  }
}

TEST(Asynchronous, RanksStayWithinMaxStaleness) {
  constexpr std::int64_t kMost = 2;
  const TestFolder folder;
  Strategy strategy = asynchronous(sgd);
  strategy.sync.asynchronous.max_staleness = kMost;
  strategy.sync.asynchronous.record_order = folder / "order.jsonl";
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    for (std::size_t i = 0; i < 12; ++i) {
      if (mesh.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      session.train(i);
    }
  });
  std::vector<std::int64_t> pushed(kRanks);
  std::int64_t furthest = 0;
  for (const OrderLine& line : read_lines(folder / "order.jsonl")) {
    std::int64_t& own = pushed[static_cast<std::size_t>(line.rank)];
    if (line.is_push) own = line.step;
    if (line.is_push) continue;
    furthest = std::max(furthest, line.step - 1 - *std::ranges::min_element(pushed));
  }
  EXPECT_EQ(furthest, kMost);
}

TEST(Asynchronous, WaitsCountAsCommunicationAndPullsAsGathers) {
  constexpr std::size_t kSteps = 4;
  Strategy strategy = asynchronous(sgd);
  strategy.sync.asynchronous.max_staleness = 0;
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    session.engine.time_calls();
    double seconds = 0;
    for (std::size_t i = 0; i < kSteps; ++i) {
      if (mesh.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      seconds += session.train(i).communication_seconds;
    }
    if (mesh.rank() != 1) {
      EXPECT_GT(seconds, 0.2) << "waits for rank 1, which sleeps 0.4 s";
    }
    EXPECT_GT(session.engine.traffic().gather_seconds, 0);
    std::vector<std::string> pulled;
    for (const CallLatency& each : session.engine.latencies()) {
      if (each.call != "gather") continue;
      EXPECT_EQ(each.count, std::int64_t{kSteps}) << each.unit;
      pulled.push_back(each.unit);
    }
    EXPECT_EQ(pulled, session.engine.unit_names());
  });
}

TEST(Asynchronous, MemoryEqualsThePlan) {
  run_ranks({.ranks = kRanks}, [](const Mesh& mesh) {
    for (const OptimizerType type : {OptimizerType::kAdamW, OptimizerType::kSgd}) {
      Strategy strategy = asynchronous();
      strategy.optimizer.type = type;
      Session session(mesh, strategy);
      const StepResult result = session.train(0);
      EXPECT_EQ(result.planned, result.allocated);
      const MemoryUse planned = plan_memory(*session.model, strategy, mesh.topology()).use;
      EXPECT_EQ(planned, result.planned);
    }
  });
}

TEST(Asynchronous, CheckpointResumesWithTheSameBits) {
  const TestFolder folder;
  Strategy strategy = asynchronous();
  strategy.sync.asynchronous.max_staleness = 0;
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
    for (std::size_t i = 3; i < 6; ++i) session.train(i);
    barrier(mesh);
    EXPECT_TRUE(all_same_bits(session.values(), wanted));
    barrier(mesh);
  });
}

TEST(Asynchronous, WriteUnderAGuardReachesAllRanks) {
  run_ranks({.ranks = kRanks}, [](const Mesh& mesh) {
    Session session(mesh, asynchronous(sgd));
    session.train(0);
    barrier(mesh);
    {
      const Gathered guard(session.engine, Gathered::kWrite);
      const at::NoGradGuard no_grad;
      for (auto& parameter : session.model->parameters()) parameter.fill_(0.25);
    }
    for (const auto& [name, value] : session.values()) EXPECT_TRUE((value == 0.25).all().item<bool>()) << name;
    barrier(mesh);
    session.train(1);
  });
}

TEST(Asynchronous, PlanOfOtherParametersIsRefused) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, asynchronous(sgd));
    EXPECT_THAT(usage_error_of([&] { session.engine.set_trainable("blocks.0.*", false); }),
                HasSubstr("set_trainable with \"sync\" other than each_step"));
  });
}

TEST(Asynchronous, MemoryLimitThatIsTooLowNamesNoOtherStrategy) {
  const std::string error = error_of([] {
    run_ranks({.ranks = 2}, [](const Mesh& mesh) {
      Strategy strategy = asynchronous();
      Tiny model = make_tiny({}, false);
      strategy.memory.limit_bytes = plan_memory(*model, strategy, mesh.topology()).use.limited() - 1;
      const Session session(mesh, strategy);
    });
  });
  EXPECT_THAT(error, HasSubstr("/memory/limit: the plan for SHARD_OPTIMIZER needs"));
  EXPECT_THAT(error, Not(HasSubstr("the next cheaper strategy")));
}

TEST(Asynchronous, ModuleWhoseEngineIsGoneHasTheNewestValues) {
  Values newest;
  std::vector<Values> left(kRanks);
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Tiny model = nullptr;
    {
      Session session(mesh, asynchronous(sgd));
      model = session.model;
      for (std::size_t i = 0; i < 3; ++i) session.train(i);
      barrier(mesh);
      if (mesh.rank() == 0) newest = session.values();  // a pull, which the other ranks do not make
    }
    left[static_cast<std::size_t>(mesh.rank())] = values_of(*model);
  });
  for (const Values& values : left) EXPECT_TRUE(all_same_bits(values, newest));
}

void hogwild(Strategy& s) {
  sgd(s);
  s.sync.type = SyncType::kHogwild;
}

void one_backup(Strategy& s) {
  sgd(s);
  s.sync.type = SyncType::kBackups;
  s.sync.backups = 1;
}

/// Runs `body`, which trains, as one rank of a run on processes. Returns the error that ended the rank, if any.
absl::Status as_process(int rank, int port, double timeout_s, const std::function<void(const Mesh&)>& body) {
  join_as(rank, kRanks, port, 1);
  at::set_num_threads(1);
  Strategy strategy = asynchronous(sgd);
  strategy.comm.timeout_s = timeout_s;
  const Mesh mesh = init(strategy);
  try {
    body(mesh);
  } catch (const std::exception& error) {  // if a pull fails, the operator throws another error
    const absl::Status told = groups_of(mesh).status();
    return told.ok() ? make_error(ExitCode::kInternal, error.what()) : told;
  }
  return absl::OkStatus();
}

TEST(Asynchronous, StoppedRankHoldsNobodyUp) {
  for (const Adjust& adjust : {Adjust(sgd), Adjust(hogwild), Adjust(one_backup)}) {
    const int port = free_port();
    ForkedRanks ranks(kRanks, [&](int rank, KeyValueStore& store) {
      return as_process(rank, port, 60, [&](const Mesh& mesh) {
        Session session(mesh, asynchronous(adjust));
        bool was_stopped = false;
        for (std::int64_t step = 0; step < 30;) {
          if (rank == 2 && step >= 3 && !std::exchange(was_stopped, true)) ::raise(SIGSTOP);
          step = session.train(static_cast<std::size_t>(step)).step;
        }
        store.set("done " + std::to_string(rank), "").IgnoreError();
        barrier(mesh);
      });
    });
    EXPECT_TRUE(told(ranks.store(), "done 0").ok());
    EXPECT_TRUE(told(ranks.store(), "done 1").ok());
    ranks.signal(2, SIGCONT);
    expect_ok(ranks, 0, kRanks);
  }
}

/// Kills a rank while all ranks train, and expects that the others end and name the killed rank.
void expect_end_of_all(const Adjust& adjust, int killed) {
  const int port = free_port();
  ForkedRanks ranks(kRanks, [&](int rank, KeyValueStore&) {
    return as_process(rank, port, 60, [&](const Mesh& mesh) {
      Session session(mesh, asynchronous(adjust));
      for (std::size_t i = 0;; ++i) {
        if (rank == killed && i == 5) ::raise(SIGKILL);
        session.train(i);
      }
    });
  });
  EXPECT_EQ(ranks.wait(killed).signal, SIGKILL);
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank == killed) continue;
    const RankEnd end = ranks.wait(rank);
    EXPECT_EQ(end.signal, 0) << rank;
    EXPECT_EQ(end.exit_code, ExitCode::kPeerLost) << end.message;
    EXPECT_THAT(end.message, HasSubstr("rank " + std::to_string(killed)));
  }
}

TEST(Asynchronous, KilledRankEndsTheOthersWithItsName) {
  const Adjust at_most_one_ahead = [](Strategy& s) { sgd(s), s.sync.asynchronous.max_staleness = 1; };
  for (const Adjust& adjust : {Adjust(sgd), at_most_one_ahead, Adjust(hogwild), Adjust(one_backup)})
    expect_end_of_all(adjust, /*killed=*/2);
}

TEST(Asynchronous, KilledRankZeroThatServesTheStoreIsNamedToo) {
  for (const Adjust& adjust : {Adjust(sgd), Adjust(hogwild), Adjust(one_backup)})
    expect_end_of_all(adjust, /*killed=*/0);
}

TEST(Asynchronous, RankThatEndsEarlyIsNamedByThoseWhoWaitForIt) {
  Strategy strategy = asynchronous(sgd);
  strategy.sync.asynchronous.max_staleness = 1;
  const std::string error = error_of([&] {
    run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < (mesh.rank() == 1 ? 2U : 20U); ++i) session.train(i);
    });
  });
  EXPECT_THAT(error, HasSubstr("rank 1"));
  EXPECT_THAT(error, HasSubstr("has left"));
}

TEST(Asynchronous, ProgramThatLeavesThePlayedOrderIsRefused) {
  const TestFolder folder;
  Strategy strategy = asynchronous(sgd);
  strategy.sync.asynchronous.record_order = folder / "order.jsonl";
  run(strategy, 2);
  strategy.sync.asynchronous.record_order.clear();
  strategy.sync.asynchronous.play_order = folder / "order.jsonl";
  EXPECT_THAT(error_of([&] { run(strategy, 3); }), HasSubstr("has no more of it by rank"));
  folder.write("bad.jsonl", "{\"tessera_order\":1,\"ranks\":3}\n{\"event\":0}\n");
  strategy.sync.asynchronous.play_order = folder / "bad.jsonl";
  EXPECT_THAT(error_of([&] { run(strategy, 1); }), HasSubstr("line 2: it is no line of an order"));
  folder.write("other.jsonl", "{\"tessera_order\":1,\"ranks\":2}\n");
  strategy.sync.asynchronous.play_order = folder / "other.jsonl";
  EXPECT_THAT(error_of([&] { run(strategy, 1); }), HasSubstr("is of 2 ranks, and this run has 3"));
  strategy.sync.asynchronous.play_order = folder / "none.jsonl";
  EXPECT_THAT(error_of([&] { run(strategy, 1); }), HasSubstr("none.jsonl"));
}

TEST(Asynchronous, UnsupportedKeysBesideAsynchronousAreRefused) {
  const std::pair<const char*, const char*> refused[] = {
      {R"("optimizer": {"state_dtype": "8bit"})", "state_dtype bf16 or 8bit"},
      {R"("optimizer": {"in_backward": true})", "in_backward"},
      {R"("mixed_precision": {"param": "bf16"})", "param bf16 or fp16"},
      {R"("mixed_precision": {"reduce": "bf16"})", "mixed_precision.reduce bf16 or fp16"},
      {R"("ema": {"decay": 0.9})", "ema"},
      {R"("on_spike": {"action": "skip"})", "on_spike"},
      {R"("durable": {"every": 1, "dir": "d"})", "durable"},
      {R"("checkpoint": {"async": true})", "checkpoint.async"},
      {R"("check": {"replica_hash_every": 1})", "check.replica_hash_every"},
      {R"("broadcast_buffers": "mean")", "broadcast_buffers"},
      {R"("compression": {"gradients": "int8"})", "compression"},
      {R"("lr_schedule": {"base_batch_size": 8})", "base_batch_size"},
      {R"("lr_schedule": {"warmup_samples": 8})", "warmup_samples or warmup_epochs"},
      {R"("comm": {"transport": "gloo"})", "comm.transport gloo"},
      {R"("mesh": {"replicate": 2})", "mesh.replicate above 1"}};
  const auto error_with = [](const std::string& more) {
    return error_of([&] {
      Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "asynchronous"}, )" + more + "}");
    });
  };
  for (const auto& [with, named] : refused) {
    EXPECT_THAT(error_with(with), HasSubstr("asynchronous cannot stand beside")) << with;
    EXPECT_THAT(error_with(with), HasSubstr(named)) << with;
  }
  const std::string one_file = R"("sync": {"type": "asynchronous", "record_order": "a", "play_order": "a"})";
  EXPECT_THAT(error_of([&] { Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", )" + one_file + "}"); }),
              HasSubstr("/sync/record_order: is the file of play_order too"));
  const std::string adaptive = R"("sync": {"type": "asynchronous", "delay_compensation": {"adaptive": true}})";
  EXPECT_THAT(error_of([&] { Strategy::from_json(R"({"strategy": "SHARD_OPTIMIZER", )" + adaptive + "}"); }),
              HasSubstr("/sync/delay_compensation/adaptive: needs a \"lambda\" above 0"));
  EXPECT_THAT(error_with(R"("reproducible": true)"), HasSubstr("cannot stand beside a sync.type other than each_step"));
  EXPECT_THAT(error_of([] { Strategy::from_json(R"({"sync": {"type": "asynchronous"}})"); }),
              HasSubstr("SHARD_OPTIMIZER"));
  EXPECT_THAT(
      error_of([] {
        Strategy::from_json(
            R"({"strategy": "SHARD_OPTIMIZER", "sync": {"type": "local_sgd", "every": 2, "scale": "inverse"}})");
      }),
      HasSubstr("sync.type asynchronous"));
  EXPECT_EQ(error_with(R"("gradient_clipping": 1.0)"), "");
  for (const Adjust& adjust : {Adjust(nullptr), Adjust(hogwild)}) {
    Strategy two_replicas = asynchronous(adjust);
    two_replicas.mesh.shard = 2;
    EXPECT_THAT(error_of([&] {
                  run_ranks({.ranks = 4}, [&](const Mesh& mesh) { const Session session(mesh, two_replicas); });
                }),
                HasSubstr("/mesh/shard: asynchronous and hogwild"));
  }
  EXPECT_THAT(error_of([] {
                run_ranks({.ranks = 2}, [](const Mesh& mesh) {
                  const torch::nn::Sequential module(SyncBatchNorm(torch::nn::BatchNormOptions(4), mesh));
                  Engine(module.ptr(), asynchronous(), mesh);
                });
              }),
              HasSubstr("a SyncBatchNorm"));
}

}  // namespace asynchronous_test
}  // namespace tessera::testing
