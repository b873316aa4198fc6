// Tests "sync": {"type": "asynchronous"} and backups on an emulated GPU. Ranks copy values from shards in the host's
// memory to the GPU, and push the GPU's gradients. Runs whose order is fixed give the same bits as on the CPU.

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "engine/asynchronous/servers/parameter_server.h"
#include "runtime/border/throw.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tests/engine/asynchronous/order_lines.h"
#include "tests/engine/asynchronous/order_oracle.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace device_asynchronous_test {

using ::testing::HasSubstr;

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

/// Returns a strategy under which ranks push in rank order, so that runs have the same bits each time.
Strategy in_rounds(const Adjust& adjust = nullptr) {
  Strategy strategy = asynchronous(adjust);
  strategy.sync.asynchronous.max_staleness = 0;
  return strategy;
}

struct Option {
  const char* name;
  Adjust adjust;
  TinyOptions model = {};
};
const std::vector<Option>& options() {
  static const std::vector<Option> list = {
      {"adamw", nullptr},
      {"clipped", [](Strategy& s) { s.gradient_clipping = 0.05; }},
      {"inverse", [](Strategy& s) { sgd(s), s.sync.asynchronous.scale = AgeScale::kInverse; }},
      {"compensated", [](Strategy& s) { sgd(s), s.sync.asynchronous.delay_compensation.lambda = 2.0; }},
      {"compensated adaptively",
       [](Strategy& s) {
         s.sync.asynchronous.delay_compensation.lambda = 0.5;
         s.sync.asynchronous.delay_compensation.adaptive = true;
       }},
      {"two microbatches", [](Strategy& s) { s.gradient_accumulation = 2; }},
      {"two microbatches, summed in place",
       [](Strategy& s) {
         s.gradient_accumulation = 2;
         s.gradient_sync = GradientSync::kLastMicrobatch;
       }},
      {"a tied head, frozen and unused blocks",
       [](Strategy& s) { s.gradient_clipping = 0.5; },
       {.tied_head = true, .frozen_first_block = true, .unused_block = true}}};
  return list;
}

struct Ran {
  std::vector<std::vector<double>> losses, norms, ages;  ///< [rank][step]
  std::vector<MemoryUse> use;                            ///< [rank]
  Values values;                                         ///< the values after all ranks have pushed
};

/// Trains steps [begin, end). Checks that the last step needs as much memory as its plan says.
void train_as_planned(Session& session, Ran& result, std::size_t begin, std::size_t end) {
  const auto rank = static_cast<std::size_t>(session.mesh.rank());
  for (std::size_t i = begin; i < end; ++i) {
    StepResult step = session.train(i);
    step.wait();
    if (i + 1 == end) {
      EXPECT_EQ(step.planned, step.allocated);
    }
    result.losses[rank].push_back(step.loss);
    result.norms[rank].push_back(step.grad_norm);
    result.ages[rank].push_back(step.staleness_mean);
    result.use[rank] = step.planned;
  }
}

Ran for_ranks(int ranks) {
  const auto count = static_cast<std::size_t>(ranks);
  Ran result;
  result.losses.resize(count);
  result.norms.resize(count);
  result.ages.resize(count);
  result.use.resize(count);
  return result;
}

Ran run(const ThreadRanks& ranks, const Strategy& strategy, std::size_t steps, const TinyOptions& model = {}) {
  Ran result = for_ranks(ranks.ranks);
  run_ranks(ranks, [&](const Mesh& mesh) {
    Session session(mesh, strategy, model);
    train_as_planned(session, result, 0, steps);
    barrier(mesh);
    Values values = session.values();
    if (mesh.rank() == 0) result.values = std::move(values);
  });
  return result;
}

void expect_same_run(const Ran& got, const Ran& wanted, const std::string& what) {
  EXPECT_EQ(got.losses, wanted.losses) << what;
  EXPECT_EQ(got.norms, wanted.norms) << what;
  EXPECT_EQ(got.ages, wanted.ages) << what;
  EXPECT_TRUE(all_same_bits(got.values, wanted.values)) << what;
}

/// Checks that a run on GPUs has the bits of a run on the CPU. It tests GPUs that make copies as late as possible, and
/// GPUs that make copies at once.
void expect_as_on_the_cpu(int ranks, const Strategy& strategy, const std::string& what, const TinyOptions& model = {}) {
  const Ran wanted = run({.ranks = ranks}, strategy, 5, model);
  const auto expect = [&](const ThreadRanks& joined, const std::string& how) {
    const Ran got = run(joined, strategy, 5, model);
    expect_same_run(got, wanted, what + ", " + std::to_string(ranks) + " ranks " + how);
    for (const MemoryUse& use : got.use) {
      EXPECT_EQ(use[MemoryCategory::kOptimizer], 0) << what << ": shards are the host's";
      EXPECT_GT(use[MemoryCategory::kHostRecords], wanted.use[0][MemoryCategory::kOptimizer]) << what;
    }
  };
  on_gpus_in_turn(ranks, expect);
  const EmulatedGpus gpus(CopiesRead::kAtOnce);
  expect(late({.ranks = ranks}), "that copy at once");
}

/// Returns the pushes and pulls of each shard in order, as rank and kind.
auto by_shard(const std::vector<OrderLine>& lines) {
  std::map<std::tuple<std::string, std::size_t, int>, std::vector<std::pair<int, bool>>> shards;
  for (const OrderLine& line : lines) shards[{line.unit, line.group, line.owner}].push_back({line.rank, line.is_push});
  return shards;
}

TEST(DeviceAsynchronous, RoundsHaveTheCpusBitsAndThePlansMemory) {
  for (const Option& option : options())
    expect_as_on_the_cpu(kRanks, in_rounds(option.adjust), option.name, option.model);
  for (const int ranks : {1, 2}) {
    for (const std::size_t option : {std::size_t{1}, std::size_t{5}, std::size_t{6}})
      expect_as_on_the_cpu(ranks, in_rounds(options()[option].adjust), options()[option].name);
  }
}

TEST(DeviceAsynchronous, PlayedOrderGivesTheBitsAndTheOrderThatTheCpuHasRecorded) {
  for (const Option& option : options()) {
    const TestFolder folder;
    Strategy strategy = asynchronous(option.adjust);
    strategy.sync.asynchronous.record_order = folder / "order.jsonl";
    const Ran wanted = run({.ranks = kRanks}, strategy, 4, option.model);
    strategy.sync.asynchronous.play_order = folder / "order.jsonl";
    strategy.sync.asynchronous.record_order = folder / "again.jsonl";
    on_gpus_in_turn(kRanks, [&](const ThreadRanks& joined, const std::string& how) {
      expect_same_run(run(joined, strategy, 4, option.model), wanted, option.name + (" " + how));
      EXPECT_EQ(by_shard(read_lines(folder / "again.jsonl")), by_shard(read_lines(folder / "order.jsonl")));
    });
  }
}

/// LibTorch uses one thread while this object lives.
struct OneThread {
  OneThread() { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  const int before = at::get_num_threads();
};

TEST(DeviceAsynchronous, RandomOrdersEqualPlainLibTorch) {
  const OneThread one;
  const TestFolder folder;
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    const Option& option = options()[seed % 2 == 0 ? 0 : 3];  // adamw, and sgd with delay compensation
    SCOPED_TRACE(std::string(option.name) + ", seed " + std::to_string(seed));
    Strategy strategy = asynchronous(option.adjust);
    on_gpus_in_turn(kRanks, [&](const ThreadRanks& joined, const std::string&) {
      strategy.sync.asynchronous.play_order.clear();
      strategy.sync.asynchronous.record_order = folder / "order.jsonl";
      run(joined, strategy, 3);
      const auto order = shuffled(read_lines(folder / "order.jsonl"), kRanks, seed);
      write_lines(folder / "random.jsonl", kRanks, order);
      strategy.sync.asynchronous.record_order.clear();
      strategy.sync.asynchronous.play_order = folder / "random.jsonl";
      const Ran got = run(joined, strategy, 3);
      OrderOracle oracle(strategy, kRanks);
      oracle.play(counted(order));
      EXPECT_EQ(got.losses, oracle.losses());
      EXPECT_TRUE(all_same_bits(got.values, oracle.values()));
    });
  }
}

/// Trains three steps, saves and trains on. Then another Engine loads what was saved, and makes the same steps.
Ran saved_and_loaded(const ThreadRanks& ranks, const Strategy& strategy, const std::string& folder) {
  Ran result = for_ranks(ranks.ranks), again = for_ranks(ranks.ranks);
  run_ranks(ranks, [&](const Mesh& mesh) {
    const auto trained_on = [&](Session& session, Ran& told) {
      train_as_planned(session, told, 3, 6);
      barrier(mesh);
      Values values = session.values();
      barrier(mesh);
      if (mesh.rank() == 0) told.values = std::move(values);
    };
    {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < 3; ++i) session.train(i);
      save_checkpoint(session.engine, folder);
      trained_on(session, result);
    }
    Session session(mesh, strategy);
    load_checkpoint(session.engine, folder);
    EXPECT_EQ(session.engine.steps_applied(), 3);
    trained_on(session, again);
  });
  expect_same_run(again, result, "loaded");
  return result;
}

/// Loads what saved_and_loaded has saved, and trains on.
Ran loaded(const ThreadRanks& ranks, const Strategy& strategy, const std::string& folder) {
  Ran result = for_ranks(ranks.ranks);
  run_ranks(ranks, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    load_checkpoint(session.engine, folder);
    train_as_planned(session, result, 3, 6);
    barrier(mesh);
    Values values = session.values();
    if (mesh.rank() == 0) result.values = std::move(values);
  });
  return result;
}

TEST(DeviceAsynchronous, CheckpointGoesOnThereAndOnTheCpuWithTheSameBits) {
  for (const int ranks : {1, kRanks}) {
    const Strategy strategy = in_rounds();
    const TestFolder of_cpu, of_gpu;
    const Ran wanted = saved_and_loaded({.ranks = ranks}, strategy, of_cpu.path().string());
    {
      const EmulatedGpus gpus;
      const ThreadRanks joined = late({.ranks = ranks});
      expect_same_run(saved_and_loaded(joined, strategy, of_gpu.path().string()), wanted, "saved on a GPU");
      expect_same_run(loaded(joined, strategy, of_cpu.path().string()), wanted, "loaded on a GPU");
    }
    expect_same_run(loaded({.ranks = ranks}, strategy, of_gpu.path().string()), wanted, "loaded on the CPU");
  }
}

TEST(DeviceAsynchronous, WriteUnderAGuardReachesAllRanks) {
  on_gpus_in_turn(kRanks, [](const ThreadRanks& joined, const std::string&) {
    run_ranks(joined, [](const Mesh& mesh) {
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
  });
}

TEST(DeviceAsynchronous, ModuleWhoseEngineIsGoneHasTheNewestValues) {
  on_gpus_in_turn(kRanks, [](const ThreadRanks& joined, const std::string&) {
    Values newest;
    std::vector<Values> left(kRanks);
    run_ranks(joined, [&](const Mesh& mesh) {
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
  });
}

TEST(DeviceAsynchronous, APlanWithoutTheGpuIsTheEngines) {
  Topology topology;
  topology.world_size = topology.local_world_size = kRanks;
  for (Strategy strategy : {in_rounds(), in_rounds(options()[4].adjust)}) {
    MemoryUse use;
    on_gpus_in_turn(kRanks,
                    [&](const ThreadRanks& joined, const std::string&) { use = run(joined, strategy, 1).use[0]; });
    strategy.comm.transport = TransportChoice::kNccl;
    EXPECT_EQ(plan_memory(*make_tiny({}, true), strategy, topology).use, use);
  }
}

TEST(DeviceAsynchronous, HogwildIsRefusedByName) {
  const EmulatedGpus gpus;
  const std::string error = error_of([] {
    run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
      Session(mesh, asynchronous([](Strategy& s) { s.sync.type = SyncType::kHogwild; })).train(0);
    });
  });
  EXPECT_THAT(error, HasSubstr("hogwild trains one copy of the parameters"));
}

/// Parameter servers, which the environment names while this object lives.
class Servers {
 public:
  explicit Servers(int count) {
    std::string all;
    for (int i = 0; i < count; ++i) {
      servers_.push_back(value_or_throw(ParameterServer::start("127.0.0.1:0", kSecret)));
      all += (i == 0 ? "" : ",") + servers_.back()->address();
    }
    setenv("TESSERA_SERVERS", all.c_str(), 1);
    setenv("TESSERA_SERVERS_SECRET", kSecret, 1);
  }
  ~Servers() {
    unsetenv("TESSERA_SERVERS");
    unsetenv("TESSERA_SERVERS_SECRET");
  }
  Servers(const Servers&) = delete;
  Servers& operator=(const Servers&) = delete;

 private:
  static constexpr char kSecret[] = "a secret of this test";
  std::vector<std::unique_ptr<ParameterServer>> servers_;
};

Adjust served(const Adjust& adjust = nullptr) {
  return [adjust](Strategy& s) {
    s.sync.asynchronous.owners = ShardOwners::kServers;
    if (adjust) adjust(s);
  };
}

TEST(DeviceAsynchronous, RoundsWithServersHaveTheCpusBits) {
  const Servers servers(2);
  for (const std::size_t option : {std::size_t{1}, std::size_t{3}, std::size_t{5}, std::size_t{7}})
    expect_as_on_the_cpu(kRanks, in_rounds(served(options()[option].adjust)), options()[option].name,
                         options()[option].model);
}

TEST(DeviceAsynchronous, RulesOfWholeTensorsHaveTheCpusBits) {
  const Servers servers(2);
  const OptimizerConfig rules[] = {{.type = OptimizerType::kLamb, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1},
                                   {.type = OptimizerType::kMuon, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1},
                                   {.type = OptimizerType::kAdafactor, .lr = 1e-1, .weight_decay = 0.1}};
  for (const OptimizerConfig& rule : rules) {
    const Adjust by_rule = [&rule](Strategy& s) { s.optimizer = rule; };
    expect_as_on_the_cpu(2, in_rounds(by_rule), name_of(rule.type) + " of ranks");
    expect_as_on_the_cpu(2, in_rounds(served(by_rule)), name_of(rule.type) + " of servers");
  }
}

TEST(DeviceAsynchronous, ReplicasOfTwoRanksHaveTheCpusBitsAndNorms) {
  const Servers servers(2);
  const Strategy strategy = in_rounds(served([](Strategy& s) {
    sgd(s);
    s.gradient_clipping = 0.05;
    s.sync.asynchronous.replica_ranks = 2;
  }));
  expect_as_on_the_cpu(4, strategy, "replicas");
}

TEST(DeviceAsynchronous, OrderWithServersThatTheCpuHasRecordedIsPlayed) {
  const Servers servers(2);
  const TestFolder folder;
  Strategy strategy = asynchronous(served(sgd));
  strategy.sync.asynchronous.record_order = folder / "order.jsonl";
  const Ran wanted = run({.ranks = kRanks}, strategy, 4);
  strategy.sync.asynchronous.record_order.clear();
  strategy.sync.asynchronous.play_order = folder / "order.jsonl";
  on_gpus_in_turn(kRanks, [&](const ThreadRanks& joined, const std::string& how) {
    expect_same_run(run(joined, strategy, 4), wanted, how);
  });
}

TEST(DeviceAsynchronous, CheckpointWithServersGoesOnWithTheSameBits) {
  const Servers servers(2);
  const Strategy strategy = in_rounds(served());
  const TestFolder of_cpu, of_gpu;
  const Ran wanted = saved_and_loaded({.ranks = kRanks}, strategy, of_cpu.path().string());
  const EmulatedGpus gpus;
  expect_same_run(saved_and_loaded(late({.ranks = kRanks}), strategy, of_gpu.path().string()), wanted, "servers");
}

Strategy with_backups(std::int64_t count) {
  Strategy strategy = asynchronous([](Strategy& s) { s.gradient_clipping = 0.05; });
  strategy.sync.type = SyncType::kBackups;
  strategy.sync.backups = count;
  return strategy;
}

TEST(DeviceAsynchronous, NoBackupsHaveTheCpusBits) {
  for (const int ranks : {1, kRanks}) expect_as_on_the_cpu(ranks, with_backups(0), "backups");
}

/// Rank 2 comes when the others have made all steps. Then its gradients are dropped.
TEST(DeviceAsynchronous, StepsWithoutTheLateRankHaveTheCpusBits) {
  constexpr std::size_t kSteps = 4;
  const auto without_the_last = [](const ThreadRanks& ranks) {
    Ran result = for_ranks(ranks.ranks);
    std::atomic<int> done{0};
    run_ranks(ranks, [&](const Mesh& mesh) {
      Session session(mesh, with_backups(1));
      if (mesh.rank() == kRanks - 1) {
        session.engine.backward(session.loss(0));
        barrier(mesh);  // the first step begins when this rank has read the first values
        while (done.load() < kRanks - 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const StepResult late = session.engine.step();
        EXPECT_EQ(late.missed, std::int64_t{kSteps});
        EXPECT_EQ(late.dropped, 1);
        result.norms[kRanks - 1] = {late.grad_norm};
      } else {
        barrier(mesh);
        train_as_planned(session, result, 0, kSteps);
        ++done;
      }
      Values values = session.values();
      if (mesh.rank() == 0) result.values = std::move(values);
      barrier(mesh);
    });
    return result;
  };
  const Ran wanted = without_the_last({.ranks = kRanks});
  on_gpus_in_turn(kRanks, [&](const ThreadRanks& joined, const std::string& how) {
    expect_same_run(without_the_last(joined), wanted, how);
  });
}

}  // namespace device_asynchronous_test
}  // namespace tessera::testing
