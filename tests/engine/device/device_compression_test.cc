// Tests compression on an emulated GPU. The GPU's host makes the compressed sums. Training gives the same bits as on
// CPU ranks over Gloo, memory is as planned, and a checkpoint saved on one device can be loaded on the other.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/saved_checkpoint.h"
#include "device_runs.h"
#include "emulated_gpu.h"
#include "runtime/config/strategy_names.h"
#include "tessera/checkpoint.h"
#include "tessera/comm_hook.h"
#include "tests/engine/wire/gradient_methods.h"
#include "tests/golden_steps/gloo_ranks.h"
#include "tests/support/durable_runs.h"
#include "tests/support/pairwise.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace device_compression_test {

using ::testing::HasSubstr;

ThreadRanks gloo(int ranks) { return over_gloo({.ranks = ranks}); }

using OnGpus = std::function<void(const ThreadRanks& joined, const std::string& what)>;

/// Runs `body` for ranks with GPUs that are as late as possible. Runs it again on one GPU, over a backend, or with
/// copies that read at once. These ways alternate; long tests use all of them.
void on_gpus_over_gloo(int ranks, const OnGpus& body) {
  static int turn = 0;
  ++turn;
  const auto is_due = [](int way) { return tests_are_long() || turn % 3 == way; };
  {
    const EmulatedGpus gpus;
    body(late(gloo(ranks)), ", late");
    if (is_due(0)) body(on_one_gpu(gloo(ranks)), ", on one GPU");
    if (is_due(1)) body(over_backend(gloo(ranks)), ", over a backend");
  }
  if (!is_due(2)) return;
  const EmulatedGpus gpus(CopiesRead::kAtOnce);
  body(late(gloo(ranks)), ", copies at once");
}

/// The results of a run, with the bytes of gradients that it sent.
struct Course {
  Told told;
  std::int64_t reductions = 0, reduced_bytes = 0;
};

void expect_same_course(const Course& got, const Course& wanted, const std::string& what) {
  expect_same(got.told, wanted.told, what);
  EXPECT_EQ(got.reductions, wanted.reductions) << what;
  EXPECT_EQ(got.reduced_bytes, wanted.reduced_bytes) << what;
}

/// Checks that memory is as planned, to the byte, and that a GPU has memory for compression only on its host.
void expect_planned(const Engine& engine, const std::string& what) {
  const MemoryUse use = engine.allocated();
  EXPECT_EQ(use, engine.plan().use) << what;
  const bool is_gpu = use[MemoryCategory::kHostRecords] > 0;
  EXPECT_TRUE(!is_gpu || use[MemoryCategory::kFeedback] == 0) << what;
}

/// Makes six steps. A step with a NaN loss is skipped after the second step, and gradients are dropped after the
/// fourth step. If updates are made in backward, only the first two and the last two steps are made.
Course course(const Mesh& mesh, const Strategy& strategy, const std::string& what) {
  Session session(mesh, strategy, kTwoBlocks);
  std::vector<StepResult> steps = train(session, 0, 2);
  if (!strategy.optimizer.in_backward) {
    while (!session.engine.step_is_due())
      session.engine.backward(session.loss(2) * std::numeric_limits<float>::quiet_NaN());
    steps.push_back(session.engine.step());
    for (StepResult& step : train(session, 2, 4)) steps.push_back(std::move(step));
    session.engine.backward(session.loss(5));
    session.engine.zero_grad();
  }
  for (StepResult& step : train(session, 4, 6)) steps.push_back(std::move(step));
  expect_planned(session.engine, what);
  const TrafficCounts traffic = session.engine.traffic();
  return {told_by(session, std::move(steps)), traffic.reductions, traffic.reduced_bytes};
}

/// Checks that `strategy` gives the same results on GPUs as on the CPU over Gloo.
void expect_as_over_gloo(int ranks, const Strategy& strategy, const std::string& what) {
  const auto body = [&](const std::string& where) {
    return [&strategy, where](const Mesh& mesh) { return course(mesh, strategy, where); };
  };
  Strategy in_memory = strategy;  // the CPU's gradients are in its host's memory anyway
  in_memory.offload = {};
  const Course wanted =
      of_rank_zero(gloo(ranks), [&](const Mesh& mesh) { return course(mesh, in_memory, what + ", CPU"); });
  // Parameters in records are padded to whole records, and the padding is sent too.
  const bool has_records = strategy.offload.parameters.tier != Tier::kMemory;
  on_gpus_over_gloo(ranks, [&](const ThreadRanks& joined, const std::string& how) {
    Course got = of_rank_zero(joined, body(what + how));
    if (has_records) got.reduced_bytes = wanted.reduced_bytes;
    expect_same_course(got, wanted, what + how);
  });
}

struct Method {
  const char* name;
  Adjust adjust;
};
const Method kMethods[] = {{"PowerSGD", power_sgd(2)},
                           {"top-k", top_k(0.05)},
                           {"top-k with momentum", top_k(0.05, 0.5)},
                           {"random-k", random_k(0.05)},
                           {"signs by vote", with_method(SignMajorityConfig())},
                           {"signs with feedback", with_method(SignFeedbackConfig())},
                           {"one bit", one_bit()},
                           {"one bit of momentum", one_bit_of_momentum},
                           {"QSGD", with_method(QsgdConfig())},
                           {"TernGrad", with_method(TernGradConfig())}};

/// Settings that change the way in which gradients are sent.
const Method kSettings[] = {
    {"each microbatch", [](Strategy& s) { s.gradient_accumulation = 2; }},
    {"last microbatch",
     [](Strategy& s) {
       s.gradient_accumulation = 2;
       s.gradient_sync = GradientSync::kLastMicrobatch;
     }},
    {"in backward", update_in_backward},
    {"restored", [](Strategy& s) { s.compression.restore_skipped = keeps_gradients(s.compression); }},
    {"later", [](Strategy& s) { s.compression.start_step = 2; }},
    {"gradients below memory", [](Strategy& s) { s.offload.gradients = Tier::kHost; }}};

// These strategies do not compare the values of ranks during the run, since the host would have to wait for these
// comparisons.
TEST(DeviceCompression, MethodsHaveTheCpusBits) {
  constexpr DType kDTypes[] = {DType::kF32, DType::kBF16};
  for (const auto& [method, setting, kind, dtype] : pairwise_of(kMethods, kSettings, kWhole, kDTypes)) {
    const Strategy strategy = strategy_for(
        kind,
        [&, &method = method, &setting = setting](Strategy& s) {
          method.adjust(s);
          setting.adjust(s);
          s.check.replica_hash_every = 0;
        },
        dtype);
    expect_as_over_gloo(2, strategy, std::string(method.name) + ", " + setting.name + ", " + name_of(kind));
  }
}

struct Form {
  const char* name;
  WireForm gradients, sums;
  bool feedback;
};
constexpr Form kForms[] = {{"int8", WireForm::kInt8, WireForm::kPlain, false},
                           {"int4 with feedback", WireForm::kInt4, WireForm::kPlain, true},
                           {"int8, sums too", WireForm::kInt8, WireForm::kInt8, true},
                           {"lossless", WireForm::kLossless, WireForm::kLossless, false}};

TEST(DeviceCompression, FormsHaveTheCpusBits) {
  constexpr ShardingStrategy kKinds[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                                         ShardingStrategy::kShardGradients, ShardingStrategy::kShardGradOp,
                                         ShardingStrategy::kFullShard};
  constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  const auto exists = [](const Form& form, const Method& setting, ShardingStrategy, DType dtype) {
    const bool is_in_backward = std::string(setting.name) == "in backward";
    return dtype != DType::kF16 || (!form.feedback && !is_in_backward);
  };
  for (const auto& [form, setting, kind, dtype] : pairwise_where(exists, kForms, kSettings, kKinds, kDTypes)) {
    const Strategy strategy = strategy_for(
        kind,
        [&, &form = form, &setting = setting, dtype = dtype](Strategy& s) {
          s.compression = {.gradients = form.gradients, .sums = form.sums, .error_feedback = form.feedback};
          s.mixed_precision.reduce = dtype == DType::kBF16 ? DType::kBF16 : DType::kF32;
          setting.adjust(s);
          s.compression.start_step = 0;
        },
        dtype);
    expect_as_over_gloo(3, strategy,
                        c10::str(form.name, ", ", setting.name, ", ", name_of(kind), ", ", tessera::name_of(dtype)));
  }
}

TEST(DeviceCompression, BothAxesHaveTheCpusBits) {
  for (const CompressedAxes axes : {CompressedAxes::kBoth, CompressedAxes::kShard, CompressedAxes::kReplicate}) {
    const Strategy strategy = strategy_for(ShardingStrategy::kHybridShard, [&](Strategy& s) {
      s.mesh = {2, 2};
      s.compression = {.gradients = WireForm::kInt8, .axes = axes, .error_feedback = true};
      if (axes == CompressedAxes::kBoth) s.gradient_accumulation = 2;
    });
    expect_as_over_gloo(4, strategy, c10::str("axes ", static_cast<int>(axes)));
  }
}

/// There are replicas of two ranks. The replicas train by themselves. All sums of a fragment are under way at once.
TEST(DeviceCompression, OuterGradientsHaveTheCpusBits) {
  constexpr Form kOuter[] = {{"int8", WireForm::kInt8, WireForm::kPlain, false},
                             {"int4, sums too", WireForm::kInt4, WireForm::kInt8, false},
                             {"lossless", WireForm::kLossless, WireForm::kLossless, false}};
  constexpr SyncType kTypes[] = {SyncType::kDiloco, SyncType::kStreamingDiloco};
  constexpr ShardingStrategy kKinds[] = {ShardingStrategy::kHybridShard, ShardingStrategy::kShardOptimizer};
  for (const auto& [form, type, kind] : pairwise_of(kOuter, kTypes, kKinds)) {
    const auto outer = [&, &form = form, type = type](Strategy& s) {
      s.mesh = {2, 2};
      s.sync = {.type = type, .every = 4};
      if (type == SyncType::kStreamingDiloco) s.sync.fragments = 2;
      s.compression = {.gradients = form.gradients, .sums = form.sums, .axes = CompressedAxes::kReplicate};
    };
    expect_as_over_gloo(4, strategy_for(kind, outer, DType::kBF16),
                        c10::str(form.name, ", type ", static_cast<int>(type), ", ", name_of(kind)));
  }
}

TEST(DeviceCompression, OuterGradientsAreRoundedOnAGpu) {
  const auto values_with = [](WireForm form) {
    const EmulatedGpus gpus;
    const Strategy strategy = strategy_for(ShardingStrategy::kNoShard, [&](Strategy& s) {
      s.mesh = {2, 1};
      s.sync = {.type = SyncType::kDiloco, .every = 1};
      if (form != WireForm::kPlain) s.compression = {.gradients = form, .axes = CompressedAxes::kReplicate};
    });
    return told_on(late(gloo(2)),
                   [&](const Mesh& mesh) {
                     Session session(mesh, strategy, kTwoBlocks);
                     return told_by(session, train(session, 0, 2));
                   })
        .values;
  };
  EXPECT_FALSE(all_same_bits(values_with(WireForm::kInt4), values_with(WireForm::kPlain)));
}

/// Sends contributions in bf16, and halves the gradient of a bucket's first parameter.
struct InBf16 final : CommHook {
  void sum(Bucket& bucket, Ranks& ranks) override {
    const at::Tensor own = bucket.gradients.to(at::kBFloat16);
    bucket.gradients.zero_();
    for (const at::Tensor& each : ranks.all_gather(own)) bucket.gradients.add_(each);
    bucket.parts.front().gradient.mul_(0.5);
  }
};

TEST(DeviceCompression, AHookHasTheCpusBits) {
  for (const CompressedAxes axes : {CompressedAxes::kBoth, CompressedAxes::kReplicate}) {
    const Strategy strategy = strategy_for(ShardingStrategy::kShardGradients, [&](Strategy& s) {
      s.compression.method = CommHookConfig();
      s.compression.axes = axes;
    });
    const auto body = [&](const Mesh& mesh) {
      Tiny model = make_tiny(kTwoBlocks, true);
      Engine engine(model, strategy, mesh, std::make_shared<InBf16>());
      const std::vector<Batch> batches = make_batches(4, 24, 5, kTwoBlocks.vocab);
      for (const Batch& batch : batches) {
        engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
        engine.step();
      }
      expect_planned(engine, "hook");
      const Gathered gathered(engine);
      return Course{{{}, values_of(*model), {}}, engine.traffic().reductions, engine.traffic().reduced_bytes};
    };
    const Course wanted = of_rank_zero(gloo(2), body);
    on_gpus_over_gloo(2, [&](const ThreadRanks& joined, const std::string& how) {
      expect_same_course(of_rank_zero(joined, body), wanted, "hook" + how);
    });
  }
}

/// Returns all that compression keeps in a checkpoint, by name, rank and place: each rank's residuals and momentum, and
/// the factors of PowerSGD.
std::map<std::string, std::vector<std::byte>> kept_in(const TestFolder& folder, int ranks) {
  std::map<std::string, std::vector<std::byte>> kept;
  const auto checkpoint = SavedCheckpoint::open(*find_checkpoint(folder.path(), "test"), "test");
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<std::string> words = {kFactors};
  for (const char* const word : kKeptOfRanks) {
    for (int rank = 0; rank < ranks; ++rank) words.push_back(of_rank(word, rank));
  }
  for (const SavedParameter& parameter : (*checkpoint)->manifest().parameters) {
    for (const std::string& word : words) {
      for (const SavedCheckpoint::Place& place : (*checkpoint)->pieces(word, parameter.name)) {
        const std::int64_t first = place.piece.offset;
        std::vector<std::byte>& bytes = kept[c10::str(word, " ", parameter.name, " ", first)];
        bytes.resize(static_cast<std::size_t>(place.piece.numel) * sizeof(float));
        EXPECT_TRUE((*checkpoint)->read(word, parameter.name, first, bytes).ok());
      }
    }
  }
  return kept;
}

TEST(DeviceCompression, CheckpointsGoFromTheCpuToAGpuAndBack) {
  const Method kKept[] = {
      {"PowerSGD", power_sgd(2)},
      {"top-k with momentum", top_k(0.1, 0.5)},
      {"one bit", one_bit()},
      {"int4", [](Strategy& s) { s.compression = {.gradients = WireForm::kInt4, .error_feedback = true}; }}};
  for (const Method& method : kKept) {
    const Strategy strategy = strategy_for(ShardingStrategy::kShardGradients, method.adjust);
    const auto save_to = [&](const TestFolder& folder) {
      return [&](const Mesh& mesh) { return saved_and_trained_on(mesh, strategy, folder.path().string()); };
    };
    std::vector<std::string> inexact;
    const auto load_from = [&](const TestFolder& folder) {
      return [&](const Mesh& mesh) { return loaded_and_trained_on(mesh, strategy, folder.path().string(), inexact); };
    };
    const TestFolder of_cpu, of_gpu;
    const Told wanted = told_on(gloo(2), save_to(of_cpu));
    const auto kept = kept_in(of_cpu, 2);
    EXPECT_FALSE(kept.empty()) << method.name;
    {
      const EmulatedGpus gpus;
      expect_same(told_on(late(gloo(2)), save_to(of_gpu)), wanted, std::string(method.name) + ", saved");
      expect_same(told_on(late(gloo(2)), load_from(of_cpu)), wanted, std::string(method.name) + ", the CPU's");
    }
    EXPECT_EQ(kept_in(of_gpu, 2), kept) << method.name;
    expect_same(told_on(gloo(2), load_from(of_gpu)), wanted, std::string(method.name) + ", the GPU's");
  }
}

TEST(DeviceCompression, ARunGoesOnFromItsCommitWithWhatItKept) {
  const EmulatedGpus gpus;
  const Method kKept[] = {
      {"top-k with momentum", top_k(0.1, 0.5)},
      {"int4", [](Strategy& s) { s.compression = {.gradients = WireForm::kInt4, .error_feedback = true}; }}};
  for (const Method& method : kKept) {
    const Strategy strategy = strategy_for(ShardingStrategy::kShardGradients, method.adjust);
    const TestFolder folder;
    run_ranks(late(gloo(2)),
              [&](const Mesh& mesh) { expect_goes_on(mesh, strategy, kTwoBlocks, folder.path(), method.name); });
  }
}

TEST(DeviceCompression, APlanWithoutTheGpuIsTheEngines) {
  Topology topology;
  topology.world_size = topology.local_world_size = 2;
  const Adjust kAdjusts[] = {one_bit(), [](Strategy& s) {
                               s.gradient_accumulation = 2;
                               s.mixed_precision.reduce = DType::kBF16;
                               s.compression = {.gradients = WireForm::kInt8, .error_feedback = true};
                             }};
  for (const Adjust& adjust : kAdjusts) {
    Strategy strategy = strategy_for(ShardingStrategy::kShardGradients, adjust);
    MemoryUse use;
    {
      const EmulatedGpus gpus;
      run_ranks(late(gloo(2)), [&](const Mesh& mesh) {
        const Session session(mesh, strategy, kTwoBlocks);
        if (mesh.rank() == 0) use = session.engine.plan().use;
      });
    }
    for (const TransportChoice transport : {TransportChoice::kNccl, TransportChoice::kCudaHost}) {
      strategy.comm.transport = transport;
      EXPECT_EQ(plan_memory(*make_tiny(kTwoBlocks, true), strategy, topology).use, use);
    }
  }
}

struct Gathers {
  const char* name;
  WireForm form;
  ShardingStrategy kind;
  DType dtype;
  std::int64_t prefetch = 1;
  Adjust adjust = [](Strategy&) {};
};

TEST(DeviceCompression, GathersHaveTheCpusBits) {
  const Adjust with_gradients = [](Strategy& s) {
    s.compression.gradients = WireForm::kInt8;
    s.gradient_accumulation = 2;
  };
  const Gathers cases[] = {
      {"int8", WireForm::kInt8, ShardingStrategy::kFullShard, DType::kF32},
      {"int4, nothing ahead", WireForm::kInt4, ShardingStrategy::kFullShard, DType::kBF16, 0},
      {"int4, three ahead", WireForm::kInt4, ShardingStrategy::kFullShard, DType::kF32, 3},
      {"int8, gradients too", WireForm::kInt8, ShardingStrategy::kFullShard, DType::kBF16, 1, with_gradients},
      {"int8, from the host", WireForm::kInt8, ShardingStrategy::kFullShard, DType::kBF16, 1,
       [](Strategy& s) {
         s.offload.parameters = {Tier::kHost, 1};
       }},
      {"lossless", WireForm::kLossless, ShardingStrategy::kFullShard, DType::kBF16},
      {"lossless", WireForm::kLossless, ShardingStrategy::kShardGradOp, DType::kF32},
      {"lossless", WireForm::kLossless, ShardingStrategy::kShardOptimizer, DType::kBF16},
      {"lossless", WireForm::kLossless, ShardingStrategy::kShardGradients, DType::kF32, 0, with_gradients}};
  for (const Gathers& each : cases) {
    const Strategy strategy = strategy_for(
        each.kind,
        [&](Strategy& s) {
          s.compression.gathers = each.form;
          s.prefetch = each.prefetch;
          each.adjust(s);
        },
        each.dtype);
    expect_as_over_gloo(2, strategy, c10::str("gathers ", each.name, ", ", name_of(each.kind)));
  }
}

/// Updated values are sent over a second axis too. If replicas train apart, each replica gathers by itself.
TEST(DeviceCompression, GathersOfTwoAxesHaveTheCpusBits) {
  const Method settings[] = {{"int4", [](Strategy& s) { s.compression.gathers = WireForm::kInt4; }},
                             {"over the world",
                              [](Strategy& s) {
                                s.compression.gathers = WireForm::kLossless;
                                s.optimizer.shard_over_world = true;
                              }},
                             {"over replicas first",
                              [](Strategy& s) {
                                s.compression.gathers = WireForm::kLossless;
                                s.strategy = ShardingStrategy::kFullShard;  // a default counts as not given
                                s.placement.parameters = CutAxes{};
                                s.placement.gradients = CutAxes{.host = true};
                                s.placement.optimizer = CutAxes{.host = true, .rank = true};
                              }},
                             {"outer steps", [](Strategy& s) {
                                s.strategy = ShardingStrategy::kShardOptimizer;
                                s.compression = {.gradients = WireForm::kInt8,
                                                 .gathers = WireForm::kLossless,
                                                 .axes = CompressedAxes::kReplicate};
                                s.sync = {.type = SyncType::kDiloco, .every = 2};
                              }}};
  for (const Method& setting : settings) {
    const Strategy strategy = strategy_for(
        ShardingStrategy::kHybridShard,
        [&](Strategy& s) {
          s.mesh = {2, 2};
          setting.adjust(s);
        },
        DType::kBF16);
    expect_as_over_gloo(4, strategy, c10::str("gathers, ", setting.name));
  }
}

TEST(DeviceCompression, GatheredValuesAreRoundedOnAGpu) {
  const auto loss_with = [](WireForm form) {
    const EmulatedGpus gpus;
    const Strategy strategy =
        strategy_for(ShardingStrategy::kFullShard, [&](Strategy& s) { s.compression.gathers = form; });
    return told_on(late(gloo(2)),
                   [&](const Mesh& mesh) {
                     Session session(mesh, strategy, kTwoBlocks);
                     return told_by(session, train(session, 0, 1));
                   })
        .steps.front()
        .loss;
  };
  EXPECT_NE(loss_with(WireForm::kInt4), loss_with(WireForm::kPlain));
}

/// A hook that fails on one rank, in a step that is not the first.
struct Failing final : CommHook {
  explicit Failing(int rank) : rank(rank) {}
  void sum(Bucket& bucket, Ranks& ranks) override {
    if (bucket.step == 2 && rank == 1) throw std::runtime_error("the hook has had enough");
    ranks.all_reduce(bucket.gradients);
  }
  const int rank;
};

TEST(DeviceCompression, AHookThatFailsEndsAllRanksAndIsNamed) {
  const EmulatedGpus gpus;
  for (const ThreadRanks& joined : {late(gloo(2)), on_one_gpu(gloo(2)), over_backend(gloo(2))}) {
    EXPECT_THAT(error_of([&] {
                  run_ranks(joined, [&](const Mesh& mesh) {
                    const Strategy strategy = strategy_for(
                        ShardingStrategy::kNoShard, [](Strategy& s) { s.compression.method = CommHookConfig(); });
                    Tiny model = make_tiny(kTwoBlocks, true);
                    Engine engine(model, strategy, mesh, std::make_shared<Failing>(mesh.rank()));
                    const Batch batch = make_batches(1, 24, 5, kTwoBlocks.vocab)[0];
                    for (int step = 0; step < 4; ++step) {
                      engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
                      engine.step().wait();
                    }
                  });
                }),
                HasSubstr("the hook has had enough"));
  }
}

}  // namespace device_compression_test
}  // namespace tessera::testing
