// Tests training on an emulated GPU: it has the same bits as on the CPU, however late the device is.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device_runs.h"
#include "emulated_gpu.h"
#include "engine/memory/expect_reproducible.h"
#include "runtime/border/throw.h"
#include "runtime/comm/shared/run_ranks.h"
#include "runtime/config/placement_rows.h"
#include "tessera/checkpoint.h"
#include "tessera/safetensors.h"
#include "tessera/uneven.h"
#include "tests/support/legal_placements.h"
#include "tests/support/limits/patience.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/late_backend.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace device_engine_test {

struct Case {
  DType dtype;
  int ranks;
  std::int64_t accumulation;
};

class DeviceEngine : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceEngine, GivesTheCpusBitsUnderEveryStrategy) {
  const auto [dtype, ranks, accumulation] = GetParam();
  for (const Placed& placed : kStrategies) {
    expect_same_on_gpus({.ranks = ranks}, strategy_of(placed, dtype, accumulation), short_run(), name_of(placed));
  }
  if (ranks < 4) return;
  for (const bool world : {false, true}) {
    Strategy hybrid = strategy_of(ShardingStrategy::kHybridShard, dtype, accumulation);
    hybrid.optimizer.shard_over_world = world;
    expect_same_on_gpus({.ranks = 4, .hosts = 2}, hybrid, short_run(), world ? "hybrid over the world" : "hybrid");
  }
}

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  return std::string(name_of(info.param.dtype)) + "_ranks" + std::to_string(info.param.ranks) + "_accumulation" +
         std::to_string(info.param.accumulation);
}

INSTANTIATE_TEST_SUITE_P(All, DeviceEngine,
                         ::testing::Values(Case{DType::kF32, 1, 1}, Case{DType::kBF16, 1, 3}, Case{DType::kF32, 2, 3},
                                           Case{DType::kBF16, 2, 1}, Case{DType::kF16, 2, 1}, Case{DType::kF32, 3, 1},
                                           Case{DType::kBF16, 4, 3}),
                         name_of_case);

TEST(DeviceEngine, PlacementsOverHostsGiveTheCpusBits) {
  for (const PlacementConfig& placement : legal_placements()) {
    if (!placement.optimizer->host) continue;
    Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 2);
    strategy.placement = placement;
    expect_same_on_gpus({.ranks = 4, .hosts = 2}, strategy, short_run(), describe_placement(strategy));
  }
}

TEST(DeviceEngine, SecondCopyGivesTheCpusBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Strategy strategy = strategy_of(ShardingStrategy::kFullShard, dtype, 2);
    strategy.secondary.form = SecondaryForm::kPlain;
    strategy.prefetch = 0;  // with one slot, units are gathered again
    expect_same_on_gpus({.ranks = 4, .hosts = 2}, strategy, short_run(), "a second copy");
  }
}

TEST(DeviceEngine, LastMicrobatchSyncGivesTheCpusBits) {
  for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard}) {
    Strategy strategy = strategy_of(kind, DType::kBF16, 2);
    strategy.gradient_sync = GradientSync::kLastMicrobatch;
    expect_same_on_gpus({.ranks = 2}, strategy, short_run(), name_of(Placed(kind)));
  }
}

void put_activations_on(Tier tier, Strategy& strategy) {
  strategy.offload.activations = tier;
  strategy.offload.activations_min_bytes = 1;
  const bool is_in_files = tier == Tier::kNvme;
  strategy.offload.record_bytes = is_in_files ? 4096 : OffloadConfig().record_bytes;
  strategy.offload.paths.clear();
  if (is_in_files) strategy.offload.paths = {std::filesystem::temp_directory_path().string()};
}

/// Copies of activations to the host and back end as late as possible, and device memory is used again meanwhile.
TEST(DeviceEngine, OffloadedActivationsChangeNoBits) {
  constexpr std::int64_t kQueueDepths[] = {1, 4, 32};
  MadeOnce<Trained> on_cpu;
  for (const auto& [placed, recompute, read, tier, queue_depth] :
       pairwise_of(kStrategies, std::array{false, true}, std::array{CopiesRead::kLate, CopiesRead::kAtOnce},
                   std::array{Tier::kHost, Tier::kNvme}, kQueueDepths)) {
    TrainOptions options = short_run();
    options.model.recompute = recompute;
    Strategy strategy = strategy_of(placed, DType::kBF16, 2);
    const std::string of = name_of(placed) + (recompute ? ", recomputed" : "");
    const Trained& wanted = on_cpu(of, [&] { return train_on_threads({.ranks = 2}, strategy, options); });
    put_activations_on(tier, strategy);
    strategy.offload.queue_depth = queue_depth;
    const std::string what =
        of + (tier == Tier::kHost ? ", host" : ", nvme") + ", queue_depth " + std::to_string(queue_depth);
    const EmulatedGpus gpus(read);
    const Trained trained = train_on_threads(late({.ranks = 2}), strategy, options);
    expect_same_bits(trained, wanted, what);
    EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << what;
    const bool all_are_on_their_way = queue_depth == 32;  // the queue has room for all copies at once
    EXPECT_EQ(trained.traffic.disk_bytes_written > 0, tier == Tier::kNvme && !all_are_on_their_way) << what;
  }
}

/// One forward has two losses, and a graph lives longer than its Engine.
TEST(DeviceEngine, OffloadedActivationsLiveAsLongAsTheirGraph) {
  const auto train = [](Tier tier) {
    std::vector<at::Tensor> seen;
    run_ranks(late({.ranks = 1}), [&](const Mesh& mesh) {
      const at::Tensor input = at::ones({32, 32}).requires_grad_();
      at::Tensor kept;
      {
        Session session(mesh, strategy_for(ShardingStrategy::kNoShard, [&](Strategy& s) {
                          if (tier != Tier::kMemory) put_activations_on(tier, s);
                        }));
        const at::Tensor loss = session.loss(0);
        session.engine.backward(loss, {.retain_graph = true});
        session.engine.backward(loss * loss);
        session.engine.step().wait();
        for (const auto& [name, value] : session.values()) seen.push_back(value);
        kept = (input * 2).sin().exp().sum();
      }
      seen.push_back(torch::autograd::grad({kept}, {input})[0]);
    });
    return seen;
  };
  const EmulatedGpus gpus;
  const auto wanted = train(Tier::kMemory);
  for (const Tier tier : {Tier::kHost, Tier::kNvme}) {
    const auto got = train(tier);
    ASSERT_EQ(got.size(), wanted.size());
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(same_bits(got[i], wanted[i])) << i;
  }
}

TEST(DeviceEngine, NarrowMomentsGiveTheCpusBits) {
  for (const StateDType states : {StateDType::kBF16, StateDType::k8Bit}) {
    Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
    strategy.optimizer.state_dtype = states;
    expect_same_on_gpus({.ranks = 2}, strategy, short_run(), "states " + std::to_string(static_cast<int>(states)));
  }
}

TEST(DeviceEngine, UnusedFrozenAndTiedParametersGiveTheCpusBits) {
  for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard}) {
    TrainOptions options = short_run();
    options.model.unused_block = options.model.frozen_first_block = options.model.tied_head = true;
    expect_same_on_gpus({.ranks = 2}, strategy_of(kind, DType::kF32, 1), options, name_of(Placed(kind)));
    options = short_run();
    options.model.recompute = options.model.shared_block = true;
    expect_same_on_gpus({.ranks = 2}, strategy_of(kind, DType::kF32, 1), options, "recomputed");
  }
}

TEST(DeviceEngine, SkippedOverflowsGiveTheCpusScheduleAndScale) {
  Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kF16, 1);
  strategy.mixed_precision.loss_scale.initial = 16777216.0;
  strategy.mixed_precision.loss_scale.backoff_factor = 0.125;
  strategy.mixed_precision.loss_scale.growth_interval = 3;
  strategy.lr_schedule.warmup_steps = 5;
  strategy.lr_schedule.warmup_from = 0.25;
  strategy.lr_schedule.base_batch_size = 6;
  strategy.lr_schedule.batch_scaling = BatchScaling::kSquareRoot;
  const TrainOptions options = short_run();
  const Trained on_cpu = train_on_threads({.ranks = 2}, strategy, options);
  EXPECT_TRUE(on_cpu.steps.front().overflow);
  EXPECT_FALSE(on_cpu.steps.back().overflow);
  expect_same_on_gpus({.ranks = 2}, strategy, options, "overflows");
}

TEST(DeviceEngine, RiseOverSamplesGivesTheCpusRatesAndBits) {
  Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kF16, 2);
  strategy.mixed_precision.loss_scale.initial = 16777216.0;  // some steps are skipped
  strategy.mixed_precision.loss_scale.backoff_factor = 0.125;
  strategy.lr_schedule = {.base_batch_size = 6, .warmup_samples = 40};
  const TrainOptions options = short_run();
  const Trained on_cpu = train_on_threads({.ranks = 2}, strategy, options);
  EXPECT_LT(on_cpu.steps.front().lr, on_cpu.steps.back().lr);
  expect_same_on_gpus({.ranks = 2}, strategy, options, "a rise over samples");
}

/// Several uploads are under way at a time, and their tensors are used in another order. Host memory is used again at
/// once.
TEST(DeviceEngine, UploadsGiveTheRequestedTensorsInAnyOrder) {
  const EmulatedGpus gpus;
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(mesh, strategy_of(ShardingStrategy::kNoShard, DType::kF32, 1));
    for (int round = 0; round < 3; ++round) {
      std::vector<Upload> uploads;
      std::vector<at::Tensor> expected;
      for (int i = 0; i < 4; ++i) {
        at::Tensor host = at::full({3, 50}, 10 * round + i), turned = host.to(at::kLong).t();
        expected.push_back(host.clone());
        uploads.push_back(session.engine.upload({host, turned, at::empty({0})}));
        host.fill_(-1);
        turned.fill_(-1);
      }
      for (int i : {2, 0, 3, 1}) {
        const std::vector<at::Tensor>& there = uploads[i].tensors();
        ASSERT_EQ(there.size(), 3);
        EXPECT_TRUE(at::equal(there[0], expected[i])) << i;
        EXPECT_TRUE(at::equal(there[1], expected[i].to(at::kLong).t())) << i;
        EXPECT_EQ(there[2].numel(), 0);
      }
    }
    const Upload dropped = session.engine.upload({at::ones({4})});
  });
}

TEST(DeviceEngine, ResultIsReadOnlyAfterItsWait) {
  const EmulatedGpus gpus;
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(mesh, strategy_of(ShardingStrategy::kNoShard, DType::kF32, 1));
    StepResult first = session.train(0), second = session.train(1);
    EXPECT_FALSE(first.is_known());
    EXPECT_TRUE(std::isnan(second.loss));
    EXPECT_EQ(session.engine.steps_applied(), 2);  // this call waits
    second.wait();
    EXPECT_TRUE(second.is_known());
    EXPECT_GT(second.loss, 0);
    first.wait();
    EXPECT_NE(first.loss, second.loss);
  });
}

TEST(DeviceEngine, SgdGivesTheCpusBits) {
  for (const bool nesterov : {false, true}) {
    Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
    strategy.optimizer.type = OptimizerType::kSgd;
    strategy.optimizer.momentum = 0.9;
    strategy.optimizer.dampening = nesterov ? 0.0 : 0.2;
    strategy.optimizer.nesterov = nesterov;
    strategy.optimizer.state_dtype = nesterov ? StateDType::kBF16 : StateDType::kF32;
    expect_same_on_gpus({.ranks = 2}, strategy, short_run(), "sgd");
    strategy.optimizer.momentum = strategy.optimizer.dampening = 0.0;
    strategy.optimizer.nesterov = false;
    strategy.optimizer.state_dtype = StateDType::kF32;
    expect_same_on_gpus({.ranks = 2}, strategy, short_run(), "sgd without momentum");
  }
}

TEST(DeviceEngine, EveryRuleWithClippedValuesGivesTheCpusBits) {
  for (const OptimizerType type : {OptimizerType::kLion, OptimizerType::kAdagrad, OptimizerType::kRmsprop}) {
    Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
    strategy.optimizer.type = type;
    strategy.optimizer.momentum = 0.9;
    strategy.optimizer.centered = true;
    strategy.gradient_clipping = 0;
    strategy.gradient_clip_value = 1e-3;
    expect_same_on_gpus({.ranks = 2}, strategy, short_run(), tessera::name_of(type));
  }
}

TEST(DeviceEngine, WeightAveragesGiveTheCpusBits) {
  for (const Placed& placed : kStrategies) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Strategy strategy = strategy_of(placed, dtype, 1);
      strategy.ema.decay = 0.75;
      Values averages[2], weights[2];
      const auto train = [&](const ThreadRanks& ranks, int run) {
        run_ranks(ranks, [&](const Mesh& mesh) {
          Session session(mesh, strategy);
          for (std::size_t i = 0; i < 6; ++i) session.train(i);
          {
            const Gathered guard(session.engine, Gathered::kEma);
            const Values values = values_of(*session.model);
            if (mesh.rank() == 0) averages[run] = values;
          }
          const Values values = session.values();
          if (mesh.rank() == 0) weights[run] = values;
        });
      };
      train({.ranks = 2}, 0);
      {
        const EmulatedGpus gpus;
        train(late({.ranks = 2}), 1);
      }
      EXPECT_TRUE(all_same_bits(averages[0], averages[1])) << name_of(placed);
      EXPECT_TRUE(all_same_bits(weights[0], weights[1])) << name_of(placed);
      EXPECT_FALSE(all_same_bits(averages[1], weights[1])) << name_of(placed);
    }
  }
}

/// Each interval in which compute waits takes a second on the emulated device. Compute waits for the gathers of 3
/// units, for 3 reductions, and for the agreement.
TEST(DeviceEngine, ExposedCommunicationIsReported) {
  const EmulatedGpus gpus;
  run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
    Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1);
    TinyOptions options;
    options.blocks = 2;
    Session session(mesh, strategy, options);
    StepResult result = session.train(0);
    EXPECT_EQ(result.communication_seconds, 0);
    result.wait();
    const TrafficCounts counts = session.engine.traffic();
    EXPECT_EQ(result.communication_seconds, static_cast<double>(counts.gathers + counts.reductions + 1));
    EXPECT_EQ(counts.reductions, 3);
  });
}

/// Each call takes one second on the emulated device.
TEST(DeviceEngine, EachGatherAndReductionOfAUnitIsTimedByTheDevice) {
  const EmulatedGpus gpus;
  for (const ShardingStrategy kind : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradients}) {
    run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
      Session session(mesh, strategy_of(kind, DType::kF32, 1), kTwoBlocks);
      session.train(0);
      EXPECT_TRUE(session.engine.latencies().empty());
      const TrafficCounts before = session.engine.traffic();
      session.engine.time_calls();
      for (std::size_t i = 1; i < 4; ++i) session.train(i);
      std::map<std::string, std::int64_t> counts;
      for (const CallLatency& each : session.engine.latencies()) {
        counts[each.call] += each.count;
        EXPECT_EQ(each.p50, 1) << each.call << " " << each.unit;
        EXPECT_EQ(each.max, 1) << each.call << " " << each.unit;
      }
      const TrafficCounts after = session.engine.traffic();
      EXPECT_EQ(counts["reduce"], after.reductions - before.reductions);
      EXPECT_EQ(counts["gather"], after.gathers - before.gathers);
      session.train(4);
      EXPECT_GT(session.engine.latencies().back().count, 3) << "times of later steps are added";
      session.engine.set_trainable("blocks.0.*", false);
      session.train(5);
      EXPECT_GT(session.engine.latencies().back().count, 4) << "the Engine's next plan goes on timing";
    });
  }
}

/// A forward without backward gathers units in advance that are never used.
TEST(DeviceEngine, EngineEndsAfterAnEvaluationWithPrefetches) {
  const EmulatedGpus gpus;
  for (const bool one_gpu : {false, true}) {
    run_ranks(one_gpu ? on_one_gpu({.ranks = 2}) : late({.ranks = 2}), [](const Mesh& mesh) {
      Session session(mesh, strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1));
      session.train(0);
      session.train(1);
      const at::NoGradGuard no_grad;
      EXPECT_GT(session.loss(0).item<double>(), 0);
      EXPECT_GT(session.engine.traffic().prefetched_gathers, 0);
    });
  }
}

TEST(DeviceEngine, ActivationsAreMeasuredInTheFirstStep) {
  const EmulatedGpus gpus;  // the emulated allocator always reports 100 MiB in use and a peak of 130 MiB
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(mesh, strategy_of(ShardingStrategy::kNoShard, DType::kF32, 1));
    EXPECT_EQ(session.engine.activation_bytes(), std::nullopt);
    session.train(0);
    EXPECT_EQ(session.engine.activation_bytes(), 30 << 20);
  });
}

TEST(DeviceEngine, GpuStrategyIsRefusedOnTheCpu) {
  for (const TransportChoice transport : {TransportChoice::kNccl, TransportChoice::kCudaHost}) {
    try {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Strategy strategy = strategy_of(ShardingStrategy::kNoShard, DType::kF32, 1);
        strategy.comm.transport = transport;
        const Session session(mesh, strategy);
      });
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      EXPECT_NE(error.message().find("tessera::init(strategy)"), std::string::npos) << error.message();
    }
  }
}

TEST(DeviceEngine, ChecksOfValuesChangeNothing) {
  for (const ShardingStrategy kind : kThree) {
    Strategy strategy = strategy_of(kind, DType::kBF16, 1);
    strategy.check.values = true;
    expect_same_on_gpus({.ranks = 2}, strategy, short_run(), name_of(Placed(kind)));
  }
}

TEST(DeviceEngine, RawPointerWriteIsFoundByCheckValues) {
  for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kShardGradients}) {
    on_gpus(2, [&](const ThreadRanks& joined, const std::string& how) {
      const auto write = [&] {
        run_ranks(joined, [&](const Mesh& mesh) {
          Session session(mesh, strategy_for(kind, [](Strategy& s) { s.check.values = true; }));
          session.train(0).wait();
          const at::Tensor& weight = session.model->head;
          auto* const memory =
              static_cast<float*>(weight.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
          // Each rank hashes its own part, so the test changes every element.
          for (std::int64_t i = 0; i < weight.numel(); ++i) memory[weight.storage_offset() + i] += 1;
          session.train(1).wait();
        });
      };
      EXPECT_THAT(error_of(write), ::testing::HasSubstr("parameter head was written through a raw pointer")) << how;
    });
  }
}

/// If a collective has failed, later results of the device are not used, and no thread waits for them for ever.
TEST(DeviceEngine, CollectiveThatFailsOnTheDeviceEndsTheStep) {
  const EmulatedGpus gpus;
  using Fault = LateBackend::Fault;
  for (const std::string axis : {"gather", "reduce", "world"}) {
    std::array<LateBackend*, 2> backends = {};
    const auto keep = [&](const std::string& group, LateBackend& backend) {
      if (group.ends_with(axis)) backends[static_cast<std::size_t>(backend.getRank())] = &backend;
    };
    std::array<std::string, 2> errors;
    try {
      run_ranks(over_backend({.ranks = 2}, keep), [&](const Mesh& mesh) {
        const auto rank = static_cast<std::size_t>(mesh.rank());
        Session session(mesh, strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1));
        session.train(0).wait();
        ASSERT_NE(backends[rank], nullptr) << axis;
        backends[rank]->fault = rank == 0 ? Fault::kFailsOnTheDevice : Fault::kStandsStill;
        Deadline limit(std::chrono::seconds(20));
        try {
          StepResult step = session.train(1);
          while (backends[rank]->aborts == 0 && !limit.passed()) std::this_thread::yield();
          step.wait();
          // the error is a tessera::Error, or another one if forward reads a unit that was never gathered
        } catch (const c10::Error& error) {
          errors[rank] = error.what_without_backtrace();
          const auto* known = dynamic_cast<const Error*>(&error);
          EXPECT_TRUE(!known || known->exit_code() == ExitCode::kPeerLost) << error.what_without_backtrace();
          throw;
        }
      });
      FAIL() << axis << ": no error";
    } catch (const c10::Error&) {
    }
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("late: "), std::string::npos) << axis << ": " << error;
    }
  }
}

/// A forward whose backward finds no memory left.
struct OutOfMemory : torch::autograd::Function<OutOfMemory> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& loss) { return loss.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "GPU 0 is full");
  }
};

TEST(DeviceEngine, OutOfMemoryIsExplainedWithTheCheaperStrategy) {
  const EmulatedGpus gpus;
  try {
    run_ranks(late({.ranks = 2}), [](const Mesh& mesh) {
      Session session(mesh, strategy_of(ShardingStrategy::kNoShard, DType::kF32, 1));
      session.train(1);
      session.engine.backward(OutOfMemory::apply(session.loss(0)));
    });
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kOsResource);
    for (const char* part :
         {"GPU 0 is full", "optimizer", "the largest unit is", "activations of the first step: 30.00 MiB",
          "the next cheaper strategy is SHARD_OPTIMIZER"}) {
      EXPECT_NE(error.message().find(part), std::string::npos) << part << " in " << error.message();
    }
  }
}

/// Trains more steps than may be in flight, changes which parameters are trainable, trains again, and so on.
Told trained_in_turns(const Mesh& mesh, const Strategy& strategy) {
  Session session(mesh, strategy, kTwoBlocks);
  std::vector<StepResult> steps;
  const auto train = [&](std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) steps.push_back(session.train(steps.size()));
  };
  train(6);
  session.engine.set_trainable("blocks.0.*", true);
  train(3);
  session.engine.set_trainable("embedding.*", false);
  session.engine.set_trainable("blocks.1.down.*", false);
  train(7);
  session.engine.set_trainable("*", true);
  train(2);
  return told_by(session, std::move(steps));
}

void expect_turns_as_on_the_cpu(int ranks, const Strategy& strategy, const std::string& what) {
  const auto body = [&](const Mesh& mesh) { return trained_in_turns(mesh, strategy); };
  const Told on_cpu = told_on({.ranks = ranks}, body);
  EXPECT_EQ(on_cpu.steps.front().overflow, strategy.mixed_precision.param == DType::kF16);
  EXPECT_FALSE(on_cpu.steps.back().overflow);
  on_gpus_in_turn(ranks, [&](const ThreadRanks& joined, const std::string& how) {
    expect_same(told_on(joined, body), on_cpu, what + ", " + std::to_string(ranks) + " ranks " + how);
  });
}

TEST(DeviceEngine, FreezingInMidTrainingGivesTheCpusBits) {
  for (const auto& [ranks, dtype, kind] :
       pairwise_of(std::array{2, 1}, std::array{DType::kF32, DType::kBF16, DType::kF16}, kThree)) {
    expect_turns_as_on_the_cpu(ranks, scheduled(kind, dtype), name_of(kind) + ", " + std::string(name_of(dtype)));
  }
}

TEST(DeviceEngine, EveryKindOfStateIsCarriedToAnotherPlan) {
  for (const StateDType states : {StateDType::kBF16, StateDType::k8Bit}) {
    for (const ShardingStrategy kind : kThree) {
      Strategy strategy = scheduled(kind, DType::kBF16);
      strategy.optimizer.state_dtype = states;
      strategy.mixed_precision.master = MasterKind::kF32;
      strategy.ema.decay = 0.75;
      expect_turns_as_on_the_cpu(2, strategy, name_of(kind) + ", states " + name_of(states));
    }
  }
}

TEST(DeviceEngine, RatesSetByHandStayAfterReplanning) {
  Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1);
  strategy.lr_schedule.type = LrScheduleType::kManual;
  const EmulatedGpus gpus;
  run_ranks(late({.ranks = 2}), [&](const Mesh& mesh) {
    Session session(mesh, strategy, kTwoBlocks);
    session.train(0);
    session.engine.set_lr(0.0625);
    session.engine.set_trainable("blocks.0.*", true);
    EXPECT_EQ(session.engine.lr(), 0.0625);
    EXPECT_EQ(session.engine.steps_applied(), 1);
    StepResult step = session.train(1);
    step.wait();
    EXPECT_EQ(step.lr, 0.0625);
    EXPECT_EQ(session.engine.steps_applied(), 2);
  });
}

/// Returns two groups: vectors without decay, and the head with other numbers. All other parameters are a third group.
std::vector<ParameterGroup> three_kinds() {
  ParameterGroup vectors{.name = "vectors", .max_dim = 1, .weight_decay = 0.0};
  ParameterGroup head{.name = "head", .match = {"head*"}, .lr_ratio = 0.1, .weight_decay = 0.3, .eps = 1e-2};
  head.betas = {0.8, 0.95};
  return {vectors, head};
}

/// Trains with groups. If no schedule sets rates, the test sets them by hand during the run: first for one group, then
/// for all.
Told trained_by_groups(const Mesh& mesh, const Strategy& strategy) {
  Session session(mesh, strategy, kTwoBlocks);
  std::vector<StepResult> steps = train(session, 0, 3);
  const auto more = [&](std::size_t begin, std::size_t end) {
    for (StepResult& step : train(session, begin, end)) steps.push_back(std::move(step));
  };
  const bool by_hand = strategy.lr_schedule.type == LrScheduleType::kManual;
  if (by_hand) {
    session.engine.set_lr("vectors", 0.02);
    session.engine.set_option("head", "weight_decay", 0.5);
    session.engine.set_option("betas", {0.7, 0.9});
  }
  more(3, 9);
  if (by_hand) {
    session.engine.set_lr(0.003);
    session.engine.set_lr("head", 0.0);
    session.engine.set_option("vectors", "eps", 1e-3);
    EXPECT_EQ(session.engine.lr("head"), 0.0);
  }
  more(9, 12);
  EXPECT_EQ(session.engine.lr("vectors"), session.engine.lr());
  return told_by(session, std::move(steps));
}

TEST(DeviceEngine, ParameterGroupsGiveTheCpusBits) {
  const std::pair<DType, StateDType> formats[] = {{DType::kF32, StateDType::kF32},
                                                  {DType::kBF16, StateDType::kBF16},
                                                  {DType::kBF16, StateDType::k8Bit},
                                                  {DType::kF16, StateDType::kF32}};
  for (const auto& [kind, format, by_hand] : pairwise_of(kThree, formats, std::array{false, true})) {
    Strategy strategy = scheduled(kind, format.first);
    if (by_hand) strategy.lr_schedule = {.type = LrScheduleType::kManual};
    strategy.optimizer.groups = three_kinds();
    strategy.optimizer.state_dtype = format.second;
    const auto body = [&](const Mesh& mesh) { return trained_by_groups(mesh, strategy); };
    const Told wanted = told_on({.ranks = 2}, body);
    const std::string what = name_of(kind) + ", states " + name_of(format.second) + " ";
    on_gpus_in_turn(2, [&](const ThreadRanks& joined, const std::string& how) {
      expect_same(told_on(joined, body), wanted, what + how);
    });
  }
}

TEST(DeviceEngine, DifferentRatesOrOptionsOnRanksAreNamed) {
  Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kF32, 1);
  strategy.lr_schedule.type = LrScheduleType::kManual;
  for (const bool is_rate : {true, false}) {
    const EmulatedGpus gpus;
    const std::string told = error_of([&] {
      run_ranks(late({.ranks = 3}), [&](const Mesh& mesh) {
        Session session(mesh, strategy, kTwoBlocks);
        session.train(0);
        if (mesh.rank() == 2) is_rate ? session.engine.set_lr(0.0625) : session.engine.set_option("eps", 0.25);
        session.train(1).wait();
      });
    });
    EXPECT_THAT(told, ::testing::HasSubstr("rank 0 and rank 2 have different learning rates or options"));
  }
}

TEST(DeviceEngine, GroupRatesComeBackFromACheckpoint) {
  Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, 1);
  strategy.lr_schedule.type = LrScheduleType::kManual;
  strategy.optimizer.groups = three_kinds();
  const auto trained = [&](const Mesh& mesh, const std::string& folder, bool goes_on) {
    Session session(mesh, strategy, kTwoBlocks);
    if (!goes_on) {
      train(session, 0, 2);
      session.engine.set_lr("head", 0.05);
      save_checkpoint(session.engine, folder);
    } else {
      load_checkpoint(session.engine, folder);
      EXPECT_EQ(session.engine.lr("head"), 0.05);
    }
    return told_by(session, train(session, 2, 5));
  };
  const TestFolder of_cpu;
  const auto run = [&](const ThreadRanks& ranks, const std::string& folder, bool goes_on) {
    return told_on(ranks, [&](const Mesh& mesh) { return trained(mesh, folder, goes_on); });
  };
  const Told wanted = run({.ranks = 2}, of_cpu.path().string(), false);
  on_gpus(2, [&](const ThreadRanks& joined, const std::string& how) {
    const TestFolder own;
    expect_same(run(joined, own.path().string(), false), wanted, how);
    expect_same(run(joined, own.path().string(), true), wanted, how + ": loaded");
    expect_same(run(joined, of_cpu.path().string(), true), wanted, how + ": loaded what the CPU saved");
  });
}

TEST(DeviceEngine, CheckpointsEqualTheCpus) {
  for (const ShardingStrategy kind : kThree) {
    expect_checkpoints_as_on_the_cpu(2, scheduled(kind, DType::kBF16), name_of(kind));
  }
  for (const DType dtype : {DType::kF32, DType::kF16}) {
    expect_checkpoints_as_on_the_cpu(2, scheduled(ShardingStrategy::kFullShard, dtype), std::string(name_of(dtype)));
  }
  expect_checkpoints_as_on_the_cpu(1, scheduled(ShardingStrategy::kNoShard, DType::kF16), "alone");
  Strategy strategy = scheduled(ShardingStrategy::kFullShard, DType::kBF16);
  strategy.optimizer.state_dtype = StateDType::k8Bit;
  strategy.ema.decay = 0.75;
  expect_checkpoints_as_on_the_cpu(2, strategy, "8-bit states");
  strategy.checkpoint.async = true;
  expect_checkpoints_as_on_the_cpu(2, strategy, "8-bit states, saved beside training");
}

/// Parameters that were frozen in the checkpoint train here. They have also trained in this Engine before the load.
TEST(DeviceEngine, StatesMissingInACheckpointAreCleared) {
  const TestFolder folder;
  Strategy strategy = scheduled(ShardingStrategy::kFullShard, DType::kBF16);
  strategy.optimizer.state_dtype = StateDType::k8Bit;
  told_on({.ranks = 2}, [&](const Mesh& mesh) { return saved_and_trained_on(mesh, strategy, folder.path().string()); });
  const auto body = [&](const Mesh& mesh) {
    Session session(mesh, strategy, kTwoBlocks);
    session.engine.set_trainable("*", true);
    train(session, 0, 4);
    load_checkpoint(session.engine, folder.path());
    return told_by(session, train(session, 6, 9));
  };
  const Told wanted = told_on({.ranks = 2}, body);
  on_gpus(2,
          [&](const ThreadRanks& joined, const std::string& how) { expect_same(told_on(joined, body), wanted, how); });
}

// Microbatches have different weights on different ranks. Some losses have weight 0, the last rank has no batch in some
// steps, and one step ends before it has all its microbatches.
TEST(DeviceEngine, WeightedMicrobatchesGiveTheCpusBits) {
  struct How {
    std::int64_t accumulation;
    bool in_backward;
  };
  constexpr How kHows[] = {{1, false}, {3, false}, {1, true}};
  for (const auto& [kind, dtype, how] :
       pairwise_of(kThree, std::array{DType::kF32, DType::kBF16, DType::kF16}, kHows)) {
    if (how.in_backward && dtype == DType::kF16) continue;
    Strategy strategy = strategy_of(kind, dtype, how.accumulation);
    if (how.in_backward) update_in_backward(strategy);
    const auto body = [&](const Mesh& mesh) {
      Session session(mesh, strategy, kTwoBlocks);
      const bool is_last = mesh.rank() + 1 == mesh.world_size();
      std::vector<StepResult> steps;
      for (std::size_t i = 0; i < 8; ++i) {
        const std::size_t window = i == 6 ? 1 : session.microbatches;
        for (std::size_t m = 0; m < window; ++m) {
          const at::Tensor loss = session.loss(i * session.microbatches + m);
          if (is_last && i % 4 == 3) {
            session.engine.backward_nothing();
          } else if (is_last && i % 4 == 2) {
            session.engine.backward(loss * std::numeric_limits<float>::quiet_NaN(), {.weight = 0});
          } else {
            session.engine.backward(loss, {.weight = 0.25 + 0.3 * mesh.rank() + 0.1 * static_cast<double>(m)});
          }
        }
        steps.push_back(session.engine.step(/*partial=*/true));
      }
      return told_by(session, std::move(steps));
    };
    const std::string what = name_of(kind) + ", " + std::string(name_of(dtype)) + ", " +
                             std::to_string(how.accumulation) + " microbatches" +
                             (how.in_backward ? ", in backward" : "");
    for (const int ranks : {1, 2}) {
      if (ranks == 1 && how.accumulation > 1) continue;
      const Told wanted = told_on({.ranks = ranks}, body);
      on_gpus_in_turn(ranks, [&](const ThreadRanks& joined, const std::string& joined_how) {
        expect_same(told_on(joined, body), wanted, what + ", " + joined_how);
      });
    }
  }
}

// A rank without any batch learns from the other ranks which calls they make.
TEST(DeviceEngine, RankWithoutAnyBatchTakesPart) {
  for (const ShardingStrategy kind : kThree) {
    const Strategy strategy = strategy_of(kind, DType::kF32, 1);
    const auto body = [&](const Mesh& mesh) {
      Session session(mesh, strategy, kTwoBlocks);
      const std::vector<std::size_t> own(mesh.rank() == 0 ? 0 : 3, 0);
      std::vector<StepResult> steps;
      const auto after_step = [&](const StepResult& step) { steps.push_back(step); };
      for (const std::size_t i : uneven(own, session.engine, after_step)) {
        session.engine.backward(session.loss(i + steps.size()));
        after_step(session.engine.step());
      }
      return told_by(session, std::move(steps));
    };
    const Told wanted = told_on({.ranks = 2}, body);
    on_gpus_in_turn(2, [&](const ThreadRanks& joined, const std::string& how) {
      expect_same(told_on(joined, body), wanted, name_of(kind) + ", " + how);
    });
  }
}

TEST(DeviceEngine, ImportedSafetensorsGiveTheCpusBits) {
  for (const ShardingStrategy kind : kThree) {
    const TestFolder folder;
    const std::string file = (folder / "exported").string();
    const Strategy strategy = strategy_of(kind, DType::kBF16, 1);
    const Told wanted = told_on({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy, kTwoBlocks);
      train(session, 0, 3);
      export_safetensors(session.engine, file);
      import_safetensors(session.engine, file);
      return told_by(session, train(session, 3, 6));
    });
    on_gpus_in_turn(2, [&](const ThreadRanks& joined, const std::string& how) {
      const Told got = told_on(joined, [&](const Mesh& mesh) {
        Session session(mesh, strategy, kTwoBlocks);
        train(session, 0, 3);
        import_safetensors(session.engine, file);
        return told_by(session, train(session, 3, 6));
      });
      expect_same(got, wanted, name_of(kind) + ", " + how);
    });
  }
}

// ---- "reproducible" ----------------------------------------------------------------------------------------------

/// A number of ranks, and the number of microbatches that each of them makes.
struct Dealt {
  int ranks;
  std::int64_t each;
  std::int64_t all() const { return ranks * each; }
};

Strategy reproducible(ShardingStrategy kind, DType dtype, OptimizerType type, std::int64_t each) {
  Strategy strategy = strategy_of(kind, dtype, each);
  strategy.reproducible = true;
  strategy.gradient_sync = GradientSync::kLastMicrobatch;
  strategy.optimizer.type = type;
  return strategy;
}

/// Runs of one and of four microbatches are subtrees of the tree of sums, and runs of three are not.
TEST(DeviceReproducible, AnyNumberOfRanksGivesTheBitsOfOneOnTheCpu) {
  constexpr Dealt kDealt[] = {{1, 6}, {2, 3}, {3, 4}, {4, 1}};
  MadeOnce<Trained> alone;
  for (const auto& [dealt, kind, dtype, type] :
       pairwise_of(kDealt, kThree, std::array{DType::kF32, DType::kBF16},
                   std::array{OptimizerType::kAdamW, OptimizerType::kMuon, OptimizerType::kLamb})) {
    const int ranks = dealt.ranks;
    const Strategy of_one = reproducible(ShardingStrategy::kFullShard, dtype, type, dealt.all());
    const std::string what = std::string(tessera::name_of(dtype)) + ", " + std::string(tessera::name_of(type)) + ", " +
                             std::to_string(dealt.all()) + " microbatches";
    const Trained& wanted = alone(what, [&] { return train_on_threads({}, of_one, short_run()); });
    const Strategy strategy = reproducible(kind, dtype, type, dealt.each);
    const std::string on = what + ", " + tessera::name_of(kind) + " on " + std::to_string(ranks);
    const EmulatedGpus gpus;
    const Trained trained = train_on_threads(late({.ranks = ranks}), strategy, short_run());
    expect_same_bits(trained, wanted, on);
    EXPECT_EQ(trained.steps.back().planned, trained.allocated_at_end) << on;
    if (ranks == 1) continue;
    expect_same_bits(train_on_threads(on_one_gpu({.ranks = ranks}), strategy, short_run()), wanted, on + ", one GPU");
  }
}

/// If each rank has one microbatch, gradients are summed over one axis and then over the other. If ranks have runs of
/// three microbatches, their sums are sent to all ranks at once.
TEST(DeviceReproducible, TwoAxesGiveTheBitsOfOneOnTheCpu) {
  for (const Dealt& dealt : {Dealt{4, 1}, Dealt{4, 3}}) {
    const auto of = [](ShardingStrategy kind, std::int64_t each) {
      return reproducible(kind, DType::kBF16, OptimizerType::kAdamW, each);
    };
    const Trained wanted = train_on_threads({}, of(ShardingStrategy::kFullShard, dealt.all()), short_run());
    const Strategy hybrid = of(ShardingStrategy::kHybridShard, dealt.each);
    const EmulatedGpus gpus;
    expect_same_bits(train_on_threads(on_one_gpu({.ranks = dealt.ranks, .hosts = 2}), hybrid, short_run()), wanted,
                     std::to_string(dealt.each) + " microbatches a rank");
  }
}

/// The host's CPU gets a unit's sum only when the gradients of the step's microbatches have been added up.
TEST(DeviceReproducible, StatesThatTheHostUpdatesGiveTheBitsOfOneOnTheCpu) {
  for (const Dealt& dealt : {Dealt{1, 4}, Dealt{2, 3}}) {
    const auto of = [](std::int64_t each) {
      return reproducible(ShardingStrategy::kFullShard, DType::kBF16, OptimizerType::kAdamW, each);
    };
    const Trained wanted = train_on_threads({}, of(dealt.all()), short_run());
    Strategy below = of(dealt.each);
    below.offload.moments.tier = below.offload.masters.tier = Tier::kHost;
    below.offload.step = OffloadedStep::kCpu;
    const EmulatedGpus gpus;
    expect_same_bits(train_on_threads(late({.ranks = dealt.ranks}), below, short_run()), wanted,
                     std::to_string(dealt.ranks) + " ranks");
  }
}

TEST(DeviceReproducible, WhatAGpuCannotKeepIsRefusedByName) {
  const auto error_of_two = [](const std::function<void(Strategy&)>& change) {
    Strategy strategy = reproducible(ShardingStrategy::kFullShard, DType::kF32, OptimizerType::kAdamW, 2);
    change(strategy);
    return error_of([&] { expect_reproducible(strategy, {.mesh = {1, 2}, .is_queued = true}); });
  };
  EXPECT_EQ(error_of_two([](Strategy&) {}), "");
  EXPECT_THAT(error_of_two([](Strategy& s) { s.gradient_sync = GradientSync::kEachMicrobatch; }),
              ::testing::HasSubstr("take \"gradient_sync\": \"last_microbatch\""));
  EXPECT_THAT(error_of_two([](Strategy& s) { s.record_hashes.every = 1; }),
              ::testing::HasSubstr("leave record_hashes out"));
  EXPECT_THAT(error_of_two([](Strategy& s) { s.comm.transport = TransportChoice::kNccl; }),
              ::testing::HasSubstr("NCCL makes sums of several ranks in an order of its own"));
}

}  // namespace device_engine_test
}  // namespace tessera::testing
