// Tests the Engine on a real GPU: one rank, and several ranks that share the GPU. Ranks are forked, because each needs
// a CUDA context. No code here may use CUDA before the fork.

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "engine/device/accelerator.h"
#include "runtime/border/throw.h"
#include "runtime/comm/c10d/tcp_store.h"
#include "runtime/comm/device/device_memory.h"
#include "runtime/comm/job/process_mesh.h"
#include "runtime/comm/nccl/nccl_transport.h"
#include "tessera/checkpoint.h"
#include "tessera/comm_hook.h"
#include "tessera/durable.h"
#include "tests/engine/files/normed_runs.h"
#include "tests/engine/wire/gradient_methods.h"
#include "tests/support/fork_ranks.h"
#include "tests/support/free_port.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/own_adamw.h"
#include "tests/support/stand_ins/own_muon.h"
#include "tests/support/test_folder.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace {

const Placed kStrategies[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                              ShardingStrategy::kShardGradients, ShardingStrategy::kShardGradOp,
                              ShardingStrategy::kFullShard};

/// Returns whether this machine may use any of the host's GPUs.
bool has_gpu() {
  for (int i = 0; i < 64; ++i) {
    if (access(("/dev/nvidia" + std::to_string(i)).c_str(), F_OK) == 0) return true;
  }
  return false;
}

class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
    setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", 1);  // cuBLAS gives the same bits each time
  }
};

Topology topology_of(int rank, int ranks, int port) {
  Topology topology;
  topology.rank = topology.local_rank = rank;
  topology.world_size = topology.local_world_size = ranks;
  topology.launcher = "tessera";
  topology.master_port = port;
  topology.run_id = "gpu";
  return topology;
}

Mesh mesh_of(int rank, int ranks, int port, TransportChoice transport) {
  const CommConfig comm{.transport = transport, .timeout_s = 60, .init_timeout_s = 60};
  return value_or_throw(make_process_mesh(topology_of(rank, ranks, port), comm));
}

TrainOptions options_of(std::int64_t steps = 7) {
  TrainOptions options;
  options.steps = steps;
  options.batch = 12;
  return options;
}

Strategy strategy_of(const Placed& placed, DType dtype, TransportChoice transport) {
  Strategy strategy = tiny_strategy(placed, dtype);
  strategy.gradient_clipping = 0.5;
  strategy.comm.transport = transport;
  return strategy;
}

void be_reproducible() { at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true); }

/// Runs `body` on forked ranks, and reports the failures there.
void on_ranks(int ranks, const std::function<std::string(int rank, int port)>& body) {
  const int port = free_port();
  const std::vector<RankEnd> ends = fork_ranks(ranks, [&](int rank, KeyValueStore&) -> absl::Status {
    be_reproducible();
    const std::string wrong = body(rank, port);
    return wrong.empty() ? absl::OkStatus() : make_error(ExitCode::kInternal, wrong);
  });
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    EXPECT_TRUE(ends[rank].exit_code == ExitCode::kOk && ends[rank].signal == 0)
        << "rank " << rank << ": " << ends[rank].message << ", signal " << ends[rank].signal;
  }
}

/// Returns all differences of bits between two runs. The text is empty if there is none.
std::string difference(const Trained& a, const Trained& b, const std::string& what) {
  std::ostringstream text;
  for (std::size_t i = 0; i < a.steps.size(); ++i) {
    if (a.steps[i].overflow && b.steps[i].overflow) continue;  // the bits of a NaN do not matter
    if (a.steps[i].loss != b.steps[i].loss || a.steps[i].grad_norm != b.steps[i].grad_norm) {
      text << what << ", step " << i << ": loss " << a.steps[i].loss << " and " << b.steps[i].loss << ", norm "
           << a.steps[i].grad_norm << " and " << b.steps[i].grad_norm << "; ";
    }
  }
  for (std::size_t i = 0; i < a.values.size(); ++i) {
    if (!same_bits(a.values[i].second, b.values[i].second)) text << what << ": " << a.values[i].first << "; ";
  }
  return text.str();
}

TEST_F(Gpu, OneRankTrainsAsOnTheCpuUnderEveryStrategy) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    on_ranks(1, [&](int, int port) -> std::string {
      const Mesh mesh = mesh_of(0, 1, port, TransportChoice::kNccl);
      std::ostringstream wrong;
      std::optional<Trained> first;
      for (const Placed& placed : kStrategies) {
        Trained trained = train_on(mesh, strategy_of(placed, dtype, TransportChoice::kNccl), options_of());
        if (!first) first = trained;
        wrong << difference(trained, *first, name_of(placed));
        for (const StepResult& step : trained.steps) {
          if (!(step.planned == step.allocated)) wrong << name_of(placed) << ": allocated is not planned; ";
        }
      }
      const Trained on_cpu =
          train_on_threads({.ranks = 1}, strategy_of(kStrategies[0], dtype, TransportChoice::kAuto), options_of());
      // fp32 differs by the order of sums in products; narrow types also round every value.
      const double tolerance = dtype == DType::kF32 ? 1e-4 : 2e-2;
      for (std::size_t i = 0; i < on_cpu.steps.size(); ++i) {
        const double gpu = first->steps[i].loss, cpu = on_cpu.steps[i].loss;
        if (!(std::abs(gpu - cpu) < tolerance * cpu))
          wrong << "step " << i << ": loss " << gpu << ", CPU " << cpu << "; ";
      }
      return wrong.str();
    });
  }
}

/// Records lie in pinned memory of the host, and in files. Some tensors are so large that several of their copies are
/// under way at once. Other tensors are small.
TEST_F(Gpu, OffloadedMastersAndStatesChangeNoBits) {
  for (const int ranks : {1, 2}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      on_ranks(ranks, [&](int rank, int port) {
        const Mesh mesh = mesh_of(rank, ranks, port, TransportChoice::kCudaHost);
        std::ostringstream wrong;
        for (const Placed& placed : kStrategies) {
          Strategy strategy = strategy_of(placed, dtype, TransportChoice::kCudaHost);
          strategy.mixed_precision.loss_scale.initial = 16777216.0;  // with this scale, fp16 skips the first steps
          const Trained in_memory = train_on(mesh, strategy, options_of());
          using enum OffloadedStep;
          for (const auto& [tier, step] : {std::pair(Tier::kHost, kGpu), std::pair(Tier::kHost, kCpu),
                                           std::pair(Tier::kHost, kAuto), std::pair(Tier::kNvme, kGpu)}) {
            for (const std::int64_t depth : {1, 4}) {
              const std::string what = name_of(placed) + (tier == Tier::kHost ? ", host" : ", nvme") +
                                       (step == kCpu ? ", by the CPU" : "") + ", queue_depth " + std::to_string(depth);
              strategy.offload.step = step;
              strategy.offload.moments = {tier, depth == 1 ? 1.0 : 0.5};
              if (dtype != DType::kF32) strategy.offload.masters = strategy.offload.moments;
              strategy.offload.queue_depth = depth;
              strategy.offload.record_bytes = depth == 1 ? 4096 : 16384;
              strategy.offload.paths = {std::filesystem::temp_directory_path().string()};
              const Trained trained = train_on(mesh, strategy, options_of());
              wrong << difference(trained, in_memory, what);
              if (trained.traffic.streamed_bytes == 0 && trained.traffic.host_step.to_gpu == 0)
                wrong << what << ": nothing was updated; ";
              for (const StepResult& step : trained.steps) {
                if (!(step.planned == step.allocated)) wrong << what << ": allocated is not planned; ";
              }
            }
          }
          strategy.offload = {};
        }
        return wrong.str();
      });
    }
  }
}

/// If gradients lie in files, activations lie in files too.
TEST_F(Gpu, OffloadedParametersAndGradientsChangeNoBits) {
  struct Lying {
    Tier parameters, gradients, states;
    OffloadedStep step = OffloadedStep::kGpu;
  };
  using enum Tier;
  constexpr Lying kLying[] = {{kHost, kMemory, kMemory},
                              {kMemory, kHost, kMemory},
                              {kHost, kHost, kHost, OffloadedStep::kCpu},
                              {kHost, kHost, kHost},
                              {kNvme, kNvme, kNvme}};
  for (const int ranks : {1, 2}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      on_ranks(ranks, [&](int rank, int port) {
        const Mesh mesh = mesh_of(rank, ranks, port, TransportChoice::kCudaHost);
        std::string wrong;
        Strategy strategy = strategy_of(ShardingStrategy::kFullShard, dtype, TransportChoice::kCudaHost);
        strategy.gradient_accumulation = 2;
        const Trained in_memory = train_on(mesh, strategy, options_of());
        for (const Lying& lying : kLying) {
          OffloadConfig& offload = strategy.offload;
          offload = {};
          offload.parameters.tier = lying.parameters;
          offload.gradients = lying.gradients;
          offload.moments.tier = lying.states;
          if (dtype != DType::kF32) offload.masters.tier = lying.states;
          offload.step = lying.step;
          offload.record_bytes = 4096;
          if (lying.gradients == kNvme) {
            offload.activations = kNvme;
            offload.activations_min_bytes = 1;
            offload.paths = {std::filesystem::temp_directory_path().string()};
          }
          const std::string what = "case " + std::to_string(&lying - kLying);
          const Trained trained = train_on(mesh, strategy, options_of());
          wrong += difference(trained, in_memory, what);
          for (const StepResult& step : trained.steps) {
            if (!(step.planned == step.allocated)) wrong += what + ": allocated is not planned; ";
          }
        }
        return wrong;
      });
    }
  }
}

/// A function whose backward allocates more memory than any GPU has.
struct WantsTooMuch : torch::autograd::Function<WantsTooMuch> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& loss) { return loss.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return {at::empty({std::int64_t{1} << 44}, gradients[0].options())};
  }
};

/// LibTorch's own allocator fails. The Engine says which things take memory and which settings would need less of it.
TEST_F(Gpu, OutOfMemoryIsExplained) {
  on_ranks(1, [](int, int port) -> std::string {
    const Mesh mesh = mesh_of(0, 1, port, TransportChoice::kNccl);
    Session session(mesh, strategy_of(ShardingStrategy::kNoShard, DType::kF32, TransportChoice::kNccl));
    session.train(1);
    try {
      session.engine.backward(WantsTooMuch::apply(session.loss(0)));
    } catch (const Error& error) {
      std::string wrong = error.exit_code() == ExitCode::kOsResource ? "" : "another exit code; ";
      for (const char* part :
           {"out of memory", "65536.00 GiB", "optimizer", "the largest unit is", "activations of the first step"}) {
        if (error.message().find(part) == std::string::npos)
          wrong += std::string("no \"") + part + "\" in " + error.message();
      }
      return wrong;
    }
    return "no error";
  });
}

/// State lies on every tier. Neither computation during a unit's update nor copies of the next records may disturb the
/// update.
TEST_F(Gpu, UpdatesInBackwardChangeNoBit) {
  struct Lying {
    Tier parameters, states;
    std::int64_t queue_depth;
  };
  using enum Tier;
  constexpr Lying kLying[] = {
      {kMemory, kMemory, 1}, {kMemory, kHost, 1}, {kMemory, kHost, 8}, {kHost, kHost, 4}, {kNvme, kNvme, 2}};
  for (const int ranks : {1, 2, 4}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      on_ranks(ranks, [&](int rank, int port) {
        const Mesh mesh = mesh_of(rank, ranks, port, TransportChoice::kCudaHost);
        std::string wrong;
        for (const Placed& placed : kStrategies) {
          Strategy strategy = strategy_of(placed, dtype, TransportChoice::kCudaHost);
          strategy.gradient_clipping = 0;
          strategy.optimizer.groups = {{.name = "vectors", .max_dim = 1, .weight_decay = 0.0}};
          if (placed.kind == ShardingStrategy::kNoShard) strategy.optimizer.state_dtype = StateDType::k8Bit;
          const Trained after = train_on(mesh, strategy, options_of());
          strategy.optimizer.in_backward = true;
          for (const Lying& lying : kLying) {
            if (lying.parameters != kMemory && placed.kind != ShardingStrategy::kFullShard) continue;
            OffloadConfig& offload = strategy.offload;
            offload.parameters.tier = lying.parameters;
            offload.moments.tier = lying.states;
            if (dtype != DType::kF32) offload.masters.tier = lying.states;
            offload.record_bytes = 4096;
            offload.queue_depth = lying.queue_depth;
            offload.paths.clear();
            if (lying.states == kNvme) offload.paths = {std::filesystem::temp_directory_path().string()};
            const std::string what = name_of(placed) + ", case " + std::to_string(&lying - kLying);
            const Trained trained = train_on(mesh, strategy, options_of());
            wrong += difference(trained, after, what);
            for (const StepResult& step : trained.steps) {
              if (!(step.planned == step.allocated)) wrong += what + ": allocated is not planned; ";
            }
          }
        }
        return wrong;
      });
    }
  }
}

/// Sends contributions in bf16.
struct InBf16 final : CommHook {
  void sum(Bucket& bucket, Ranks& ranks) override {
    const at::Tensor own = bucket.gradients.to(at::kBFloat16);
    bucket.gradients.zero_();
    for (const at::Tensor& each : ranks.all_gather(own)) bucket.gradients.add_(each);
  }
};

/// Returns a change that sets plain gradient descent and codecs of gradients.
Adjust with_form(WireForm form) {
  return [=](Strategy& strategy) {
    descend(strategy);
    strategy.compression.gradients = form;
    if (form == WireForm::kLossless) strategy.compression.sums = form;
    strategy.compression.error_feedback = is_lossy(form);
  };
}

/// Hosts make these sums, over Gloo, so they have the same bits, whichever collectives a strategy uses.
TEST_F(Gpu, CompressedSumsAreTheSameUnderEveryStrategy) {
  struct Compression {
    const char* name;
    Adjust adjust;
    bool is_exact = false;
  };
  const Compression compressions[] = {{"PowerSGD", power_sgd(2)},
                                      {"top-k", top_k(0.1)},
                                      {"top-k with momentum", top_k(0.1, 0.5)},
                                      {"random-k", random_k(0.1)},
                                      {"signs by vote", with_method(SignMajorityConfig())},
                                      {"signs with feedback", with_method(SignFeedbackConfig())},
                                      {"one bit", one_bit()},
                                      {"one bit of momentum", one_bit_of_momentum},
                                      {"QSGD", with_method(QsgdConfig())},
                                      {"TernGrad", with_method(TernGradConfig())},
                                      {"hook", with_method(CommHookConfig())},
                                      {"int8", with_form(WireForm::kInt8)},
                                      {"int4", with_form(WireForm::kInt4)},
                                      {"lossless", with_form(WireForm::kLossless), /*is_exact=*/true}};
  on_ranks(2, [&](int rank, int port) {
    const Mesh mesh = mesh_of(rank, 2, port, TransportChoice::kCudaHost);
    const auto run = [&](ShardingStrategy kind, const Adjust& adjust) {
      Strategy strategy = strategy_of(kind, DType::kF32, TransportChoice::kCudaHost);
      adjust(strategy);
      TrainOptions options = options_of();
      if (std::holds_alternative<CommHookConfig>(strategy.compression.method))
        options.own_rules = OwnRules::of(std::make_shared<InBf16>());
      return train_on(mesh, strategy, options);
    };
    const Trained plain = run(ShardingStrategy::kNoShard, descend);
    std::string wrong;
    for (const Compression& compression : compressions) {
      const std::string what = compression.name;
      std::optional<Trained> first;
      for (const ShardingStrategy kind : kWhole) {
        const Trained trained = run(kind, compression.adjust);
        if (!first) first = trained;
        wrong += difference(trained, *first, what + ", " + name_of(kind));
        for (const StepResult& step : trained.steps) {
          if (!(step.planned == step.allocated)) wrong += what + ": allocated is not planned; ";
        }
      }
      const std::string from_plain = difference(*first, plain, what);
      if (compression.is_exact) wrong += from_plain;
      if (!compression.is_exact && from_plain.empty()) wrong += what + ": nothing was compressed; ";
    }
    return wrong;
  });
}

/// The loss of the last rank has one spike. The step with the spike is skipped, or training goes back to a checkpoint.
TEST_F(Gpu, SpikeIsFoundUnderEveryStrategy) {
  constexpr double kHeights[] = {1, 1, 1, 1, 1, 1, 40, 1, 1, 1};
  const TestFolder folder;
  for (const SpikeAction action : {SpikeAction::kSkip, SpikeAction::kRollback}) {
    on_ranks(2, [&](int rank, int port) {
      const Mesh mesh = mesh_of(rank, 2, port, TransportChoice::kCudaHost);
      std::string wrong;
      std::optional<Values> first;
      for (const Placed& placed : kStrategies) {
        Strategy strategy = strategy_of(placed, DType::kF32, TransportChoice::kCudaHost);
        strategy.on_spike = {.action = action, .factor = 3, .window = 3};
        if (action == SpikeAction::kRollback) strategy.checkpoint.dir = "elsewhere";
        Session session(mesh, strategy);
        int spikes = 0;
        for (std::size_t i = 0; i < std::size(kHeights); ++i) {
          session.engine.backward(session.loss(i) * (rank == 1 ? kHeights[i] : 1.0));
          StepResult step = session.engine.step();
          step.wait();
          if (step.spike) ++spikes;
          if (i == 3 && action == SpikeAction::kRollback)
            save_checkpoint(session.engine, (folder / name_of(placed)).string());
        }
        if (spikes != 1) wrong += name_of(placed) + ": " + std::to_string(spikes) + " spikes; ";
        const Values values = session.values();
        if (!first) first = values;
        if (!all_same_bits(values, *first)) wrong += name_of(placed) + " has other values; ";
      }
      return wrong;
    });
  }
}

TEST_F(Gpu, RawPointerWriteIsFoundByCheckValuesAndTheChecksChangeNothing) {
  on_ranks(2, [&](int rank, int port) {
    const Mesh mesh = mesh_of(rank, 2, port, TransportChoice::kCudaHost);
    std::string wrong;
    for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kShardGradients}) {
      Strategy strategy = strategy_of(kind, DType::kF32, TransportChoice::kCudaHost);
      const Trained unchecked = train_on(mesh, strategy, options_of());
      strategy.check.values = true;
      wrong += difference(train_on(mesh, strategy, options_of()), unchecked, name_of(Placed(kind)));
      Session session(mesh, strategy);
      session.train(0).wait();
      const at::Tensor& weight = session.model->head;
      auto* const memory =
          static_cast<float*>(weight.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
      // LibTorch cannot notice that this tensor lies in the parameter. Each rank hashes its own part, so the test
      // changes every element.
      at::from_blob(memory + weight.storage_offset(), {weight.numel()},
                    at::device(weight.device()).dtype(weight.scalar_type()))
          .add_(1);
      const std::string error = error_of([&] { session.train(1).wait(); });
      if (error.find("parameter head was written through a raw pointer") == std::string::npos)
        wrong += name_of(Placed(kind)) + ": \"" + error + "\"; ";
    }
    return wrong;
  });
}

/// Hosts make these gathers, over Gloo: packed values have the same bits as plain values, and rounded values have other
/// bits. The noise scale of gradients is the same as without shards.
TEST_F(Gpu, GathersInAnotherFormAndTheNoiseOfGradientsAreThoseOfPlainTraining) {
  on_ranks(2, [&](int rank, int port) {
    const Mesh mesh = mesh_of(rank, 2, port, TransportChoice::kCudaHost);
    Strategy strategy = strategy_of(ShardingStrategy::kNoShard, DType::kF32, TransportChoice::kCudaHost);
    strategy.noise_scale.every = 1;
    const Trained plain = train_on(mesh, strategy, options_of());
    std::string wrong;
    if (!(plain.steps.back().noise_batch > 0)) wrong += "the noise was not measured; ";
    for (const WireForm form : {WireForm::kLossless, WireForm::kInt8}) {
      strategy = strategy_of(ShardingStrategy::kFullShard, DType::kF32, TransportChoice::kCudaHost);
      strategy.noise_scale.every = 1;
      strategy.compression.gathers = form;
      const Trained trained = train_on(mesh, strategy, options_of());
      const std::string found = difference(trained, plain, "gathers");
      if (is_lossy(form) && found.empty()) wrong += "nothing was rounded; ";
      if (!is_lossy(form)) wrong += found;
      if (!is_lossy(form) && trained.steps.back().noise_variance != plain.steps.back().noise_variance)
        wrong += "shards change the noise; ";
      for (const StepResult& step : trained.steps) {
        if (!(step.planned == step.allocated)) wrong += "allocated is not planned; ";
      }
    }
    return wrong;
  });
}

/// State lies in the GPU's memory, or all of it is offloaded.
TEST_F(Gpu, RunResumesFromItsLastCommit) {
  for (const Tier tier : {Tier::kMemory, Tier::kHost, Tier::kNvme}) {
    const TestFolder folder;
    on_ranks(2, [&](int rank, int port) {
      const Mesh mesh = mesh_of(rank, 2, port, TransportChoice::kCudaHost);
      Strategy strategy = strategy_of(ShardingStrategy::kFullShard, DType::kBF16, TransportChoice::kCudaHost);
      OffloadConfig& offload = strategy.offload;
      offload.parameters.tier = offload.masters.tier = offload.moments.tier = tier;
      offload.paths = {std::filesystem::temp_directory_path().string()};
      const Values wanted = trained(mesh, strategy, 6);
      strategy.durable = {.every = 2, .dir = (folder.path() / std::to_string(static_cast<int>(tier))).string()};
      {
        Session first(mesh, strategy);
        for (std::size_t i = 0; i < 5; ++i) {
          first.train(i);
          commit_durable(first.engine);
        }
      }
      Session second(mesh, strategy);
      if (!resume_durable(second.engine)) return std::string("there is no commit");
      for (std::size_t i = 4; i < 6; ++i) second.train(i);
      return std::string(all_same_bits(second.values(), wanted) ? "" : "other bits");
    });
  }
}

TEST_F(Gpu, RanksThatShareAGpuGiveTheSameBitsUnderEveryStrategy) {
  for (const int ranks : {2, 4}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      on_ranks(ranks, [&](int rank, int port) {
        const Mesh mesh = mesh_of(rank, ranks, port, TransportChoice::kCudaHost);
        std::string wrong;
        std::optional<Trained> first;
        for (const Placed& placed : kStrategies) {
          const Trained trained = train_on(mesh, strategy_of(placed, dtype, TransportChoice::kCudaHost), options_of(5));
          if (!first) first = trained;
          wrong += difference(trained, *first, name_of(placed));
        }
        if (ranks == 4) {
          Strategy hybrid = strategy_of(ShardingStrategy::kHybridShard, dtype, TransportChoice::kCudaHost);
          hybrid.mesh.replicate = hybrid.mesh.shard = 2;
          wrong += difference(train_on(mesh, hybrid, options_of(5)), *first, "hybrid");
        }
        return wrong;
      });
    }
  }
}

/// Two ranks add one gradient each, and one rank adds its two microbatches. Both runs make one addition, so the bits
/// are the same. The key "reproducible" gives the same bits for any number of microbatches.
TEST_F(Gpu, TwoRanksGiveTheBitsOfOneThatAccumulates) {
  const int port = free_port();
  const std::vector<RankEnd> ends = fork_ranks(2, [&](int rank, KeyValueStore& store) -> absl::Status {
    be_reproducible();
    const Mesh both = mesh_of(rank, 2, port, TransportChoice::kCudaHost);
    const Trained of_two = train_on(
        both, strategy_of(ShardingStrategy::kFullShard, DType::kF32, TransportChoice::kCudaHost), options_of(5));
    const auto in_a_tree = [](ShardingStrategy kind, std::int64_t each) {
      Strategy strategy = strategy_of(kind, DType::kBF16, TransportChoice::kCudaHost);
      strategy.reproducible = true;
      strategy.gradient_sync = GradientSync::kLastMicrobatch;
      strategy.gradient_accumulation = each;
      return strategy;
    };
    const Trained tree_of_two = train_on(both, in_a_tree(ShardingStrategy::kFullShard, 3), options_of(5));
    if (rank == 1) return absl::OkStatus();
    const Mesh alone = mesh_of(0, 1, port, TransportChoice::kCudaHost);
    Strategy strategy = strategy_of(ShardingStrategy::kNoShard, DType::kF32, TransportChoice::kCudaHost);
    strategy.gradient_accumulation = 2;
    const Trained tree_of_one = train_on(alone, in_a_tree(ShardingStrategy::kNoShard, 6), options_of(5));
    const std::string wrong = difference(of_two, train_on(alone, strategy, options_of(5)), "one rank") +
                              difference(tree_of_two, tree_of_one, "six microbatches in a tree");
    return wrong.empty() ? absl::OkStatus() : make_error(ExitCode::kInternal, wrong);
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(end.exit_code == ExitCode::kOk && end.signal == 0) << end.message;
}

/// Batch norms of two ranks have the running statistics of one rank that computes all microbatches of a step.
TEST_F(Gpu, RunningStatisticsOfTwoRanksHaveTheBitsOfOne) {
  const int port = free_port();
  const std::vector<RankEnd> ends = fork_ranks(2, [&](int rank, KeyValueStore&) -> absl::Status {
    be_reproducible();
    const auto trained_on = [&](int ranks) {
      Strategy strategy =
          reproducible_test::in_order(ShardingStrategy::kFullShard, GradientSync::kLastMicrobatch, ranks);
      strategy.comm.transport = TransportChoice::kCudaHost;
      return reproducible_test::train_normed(mesh_of(rank, ranks, port, TransportChoice::kCudaHost), strategy,
                                             {.has_gpu = true});
    };
    const std::string of_two = trained_on(2).bytes;
    if (rank == 1 || of_two == trained_on(1).bytes) return absl::OkStatus();
    return make_error(ExitCode::kInternal, "two ranks have other bits than one");
  });
  for (const RankEnd& end : ends) EXPECT_TRUE(end.exit_code == ExitCode::kOk && end.signal == 0) << end.message;
}

/// NCCL needs one GPU for each rank, so one rank is tested here: its communicators, memory of each kind, its calls, and
/// its end.
TEST_F(Gpu, NcclRunsEveryCallOfOneRankFromEachKindOfMemory) {
  for (const NcclBuffers kind : {NcclBuffers::kPlain, NcclBuffers::kRegistered}) {
    on_ranks(1, [&](int, int port) -> std::string {
      const auto store = value_or_throw(tcp_store(topology_of(0, 1, port), 60));
      const Group group{.name = "world", .world_ranks = {0}, .timeout_s = 60};
      const auto groups = std::make_shared<QueuedGroups>();
      const std::shared_ptr<Collectives> nccl = value_or_throw(nccl_collectives(group, 0, kind, groups, store));
      constexpr std::size_t kNumel = 1 << 20;
      const auto input = value_or_throw(nccl->allocate(kNumel * 2)),
                 output = value_or_throw(nccl->allocate(kNumel * 4));
      const c10::Device gpu(at::kCUDA, 0);
      const at::Tensor from = tensor_on(gpu, input->data(), kNumel, at::kBFloat16);
      const at::Tensor to = tensor_on(gpu, output->data(), kNumel, at::kFloat);
      const at::Tensor values = at::arange(static_cast<std::int64_t>(kNumel), from.options()).remainder(7);
      std::string wrong;
      const auto check = [&](const char* what, Work work, const at::Tensor& result) {
        throw_if_error(work.wait());
        if (!at::equal(result.flatten().narrow(0, 0, 100).to(at::kFloat), values.narrow(0, 0, 100).to(at::kFloat))) {
          wrong += std::string(what) + " gives other values; ";
        }
      };
      from.copy_(values);
      check("reduce_scatter", nccl->reduce_scatter("unit", input->data(), DType::kBF16, to.data_ptr<float>(), kNumel),
            to);
      from.copy_(values);
      check("all_reduce", nccl->all_reduce("unit", input->data(), DType::kBF16, to.data_ptr<float>(), kNumel), to);
      from.copy_(values);
      check("all_gather", nccl->all_gather("unit", input->data(), output->data(), kNumel * 2),
            tensor_on(gpu, output->data(), kNumel, at::kBFloat16));
      check("all_to_all", nccl->all_to_all("unit", input->data(), output->data(), kNumel * 2),
            tensor_on(gpu, output->data(), kNumel, at::kBFloat16));
      check("broadcast", nccl->broadcast("unit", input->data(), kNumel * 2, 0), from);
      check("barrier", nccl->barrier("unit"), from);
      const absl::Status status = nccl->status();
      return wrong + (status.ok() ? "" : message_of(status));
    });
  }
}

void expect_own_rule_as_on_the_cpu(OptimizerType type, const OwnRules& own_rules) {
  const auto with_own = [type](Strategy strategy) {
    strategy.optimizer = {.type = type, .lr = 1e-2, .weight_decay = 0.1};
    if (type == OptimizerType::kOwnMatrix) strategy.optimizer.eps = 1e-3;
    strategy.ema.decay = 0.75;
    return strategy;
  };
  const auto trained = [&own_rules](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy, options_of().model, own_rules);
    for (std::size_t i = 0; i < 7; ++i) session.train(i);
    Values values = session.values();
    for (auto& [name, value] : values) value = value.cpu();
    return values;
  };
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int ranks : {1, 2, 3}) {
      on_ranks(ranks, [&, dtype = dtype](int rank, int port) -> std::string {
        const Mesh mesh = mesh_of(rank, ranks, port, TransportChoice::kCudaHost);
        std::string wrong;
        FirstValues first;
        Values values;
        for (const Placed& placed : kStrategies) {
          values = trained(mesh, with_own(strategy_of(placed, dtype, TransportChoice::kCudaHost)));
          if (!first.same_bits(values)) wrong += name_of(placed) + " differs; ";
        }
        Values on_cpu;
        run_ranks({.ranks = 1}, [&](const Mesh& alone) {
          on_cpu = trained(alone, with_own(strategy_of(ShardingStrategy::kNoShard, dtype, TransportChoice::kAuto)));
        });
        for (std::size_t i = 0; i < values.size(); ++i) {
          const double away = (values[i].second - on_cpu[i].second).abs().max().item<double>();
          if (!(away < (dtype == DType::kF32 ? 1e-3 : 3e-2))) wrong += values[i].first + " is not the CPU's; ";
        }
        return wrong;
      });
    }
  }
}

TEST_F(Gpu, OwnRuleTrainsAsOnTheCpuUnderEveryStrategy) {
  expect_own_rule_as_on_the_cpu(OptimizerType::kOwn, OwnRules::of(std::make_shared<OwnAdamW>()));
}

TEST_F(Gpu, OwnMatrixRuleTrainsAsOnTheCpuUnderEveryStrategy) {
  expect_own_rule_as_on_the_cpu(OptimizerType::kOwnMatrix, OwnRules::of(std::make_shared<OwnMuon>()));
}

/// The rules here are Muon, LAMB, LARS and Adafactor. cuBLAS makes products of whole matrices, with the same bits on
/// every rank. All strategies therefore give the same bits, which are close to those of the CPU.
TEST_F(Gpu, RulesOfSeveralPassesTrainAsOnTheCpu) {
  const std::pair<const char*, OptimizerConfig> rules[] = {
      {"muon", {.type = OptimizerType::kMuon, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}},
      {"lamb", {.type = OptimizerType::kLamb, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}},
      {"lars",
       {.type = OptimizerType::kLars, .lr = 0.5, .weight_decay = 0.1, .momentum = 0.9, .trust_coefficient = 0.02}},
      {"adafactor", {.type = OptimizerType::kAdafactor, .lr = 1e-1, .weight_decay = 0.1}}};
  for (const auto& [name, config] : rules) {
    for (const int ranks : {1, 2, 3, 4}) {
      on_ranks(ranks, [&, name = name, &config = config](int rank, int port) {
        const auto with_rule = [&](Strategy strategy) {
          strategy.optimizer = config;
          strategy.ema.decay = 0.75;
          return strategy;
        };
        const Mesh mesh = mesh_of(rank, ranks, port, TransportChoice::kCudaHost);
        std::string wrong;
        std::optional<Trained> first;
        for (const Placed& placed : kStrategies) {
          const Strategy strategy = with_rule(strategy_of(placed, DType::kF32, TransportChoice::kCudaHost));
          const Trained trained = train_on(mesh, strategy, options_of());
          if (!first) first = trained;
          wrong += difference(trained, *first, std::string(name) + ", " + name_of(placed));
        }
        const Trained on_cpu = train_on_threads(
            {.ranks = 1}, with_rule(strategy_of(ShardingStrategy::kNoShard, DType::kF32, TransportChoice::kAuto)),
            options_of());
        for (std::size_t i = 0; i < on_cpu.steps.size(); ++i) {
          const double gpu = first->steps[i].loss, cpu = on_cpu.steps[i].loss;
          if (!(std::abs(gpu - cpu) < 1e-3 * cpu)) wrong += std::string(name) + ": other losses than the CPU's; ";
        }
        return wrong;
      });
    }
  }
}

/// Tests rules that read state twice, rules of whole tensors, and a program's own rules, with updates in backward too.
TEST_F(Gpu, OffloadedStateOfEveryRuleChangesNoBits) {
  struct Lying {
    Tier parameters, states;
    std::int64_t queue_depth;
    bool in_backward = false;
  };
  using enum Tier;
  constexpr Lying kLying[] = {{kMemory, kHost, 1},
                              {kHost, kHost, 4},
                              {kMemory, kNvme, 4},
                              {kNvme, kNvme, 2},
                              {kHost, kHost, 2, /*in_backward=*/true}};
  const std::pair<const char*, OptimizerConfig> rules[] = {
      {"muon", {.type = OptimizerType::kMuon, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}},
      {"lamb", {.type = OptimizerType::kLamb, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}},
      {"lars",
       {.type = OptimizerType::kLars, .lr = 0.5, .weight_decay = 0.1, .momentum = 0.9, .trust_coefficient = 0.02}},
      {"own", {.type = OptimizerType::kOwn, .lr = 1e-2, .weight_decay = 0.1}},
      {"adafactor", {.type = OptimizerType::kAdafactor, .lr = 1e-2, .weight_decay = 0.1}},
      {"own_matrix", {.type = OptimizerType::kOwnMatrix, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}}};
  for (const int ranks : {1, 2}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      on_ranks(ranks, [&](int rank, int port) {
        const Mesh mesh = mesh_of(rank, ranks, port, TransportChoice::kCudaHost);
        std::string wrong;
        for (const auto& [name, config] : rules) {
          const bool is_own = config.type == OptimizerType::kOwn;
          TrainOptions options = options_of();
          if (is_own) options.own_rules = OwnRules::of(std::make_shared<OwnAdamW>());
          if (config.type == OptimizerType::kOwnMatrix) options.own_rules = OwnRules::of(std::make_shared<OwnMuon>());
          Strategy strategy = strategy_of(ShardingStrategy::kFullShard, dtype, TransportChoice::kCudaHost);
          strategy.optimizer = config;
          strategy.ema.decay = 0.75;
          strategy.gradient_clipping = 0;  // clipping is impossible with updates in backward
          const Trained in_memory = train_on(mesh, strategy, options);
          for (const Lying& lying : kLying) {
            strategy.optimizer.in_backward = lying.in_backward;
            OffloadConfig& offload = strategy.offload;
            offload = {};
            offload.parameters.tier = lying.parameters;
            offload.moments.tier = lying.states;
            if (dtype != DType::kF32) offload.masters.tier = lying.states;
            if (lying.states == kHost) offload.step = OffloadedStep::kGpu;
            offload.record_bytes = 4096;
            offload.queue_depth = lying.queue_depth;
            if (lying.states == kNvme) offload.paths = {std::filesystem::temp_directory_path().string()};
            const std::string what = std::string(name) + ", case " + std::to_string(&lying - kLying);
            const Trained trained = train_on(mesh, strategy, options);
            wrong += difference(trained, in_memory, what);
            for (const StepResult& step : trained.steps) {
              if (!(step.planned == step.allocated)) wrong += what + ": allocated is not planned; ";
            }
          }
        }
        return wrong;
      });
    }
  }
}

/// CUDA cuts small pieces of pinned memory from larger ones.
TEST_F(Gpu, PinnedMemoryIsPageAlignedAtAnySize) {
  on_ranks(1, [](int, int) -> std::string {
    const Accelerator gpu = cuda_accelerator(0);
    std::vector<std::shared_ptr<std::byte>> all;
    std::string wrong;
    for (const std::size_t bytes : {0, 1, 512, 4096, 4097, 20480, 1 << 20, 3 << 20}) {
      all.push_back(gpu.kernels->pinned_memory(bytes));
      const std::span<const std::byte> memory(all.back().get(), bytes);
      if (reinterpret_cast<std::uintptr_t>(memory.data()) % 4096 != 0) wrong += std::to_string(bytes) + " bytes; ";
      if (std::ranges::any_of(memory, [](std::byte each) { return each != std::byte{0}; })) wrong += "not zeroed; ";
    }
    return wrong;
  });
}

TEST_F(Gpu, UploadsBesideComputeBringTheirValues) {
  on_ranks(1, [&](int, int port) -> std::string {
    const Mesh mesh = mesh_of(0, 1, port, TransportChoice::kNccl);
    Tiny model = make_tiny({}, true);
    Engine engine(model, strategy_of(ShardingStrategy::kNoShard, DType::kF32, TransportChoice::kNccl), mesh);
    std::string wrong;
    for (int round = 0; round < 20; ++round) {
      at::Tensor host = at::full({1 << 20}, round, at::kFloat);
      Upload staged = engine.upload({host}), pinned = engine.upload({host.pin_memory()});
      host.fill_(-1);
      for (Upload* upload : {&staged, &pinned}) {
        if (!at::equal(upload->tensors()[0],
                       at::full({1 << 20}, round, at::device(engine.device()).dtype(at::kFloat)))) {
          wrong += "round " + std::to_string(round) + " brings other values; ";
        }
      }
    }
    return wrong;
  });
}

/// Trains Tiny in steps [begin, end), with a block that is never used. `around(engine, i)` is called before step i, and
/// at the end.
std::vector<std::pair<std::string, at::Tensor>> trained_around(const Mesh& mesh, const Strategy& strategy, int begin,
                                                               int end,
                                                               const std::function<void(Engine&, int)>& around) {
  const TinyOptions options{.unused_block = true};
  Tiny model = make_tiny(options, true);
  Engine engine(model, strategy, mesh);
  const std::vector<Batch> batches = make_batches(end, 12, 5, options.vocab);
  const std::int64_t rows = 12 / mesh.world_size();
  for (int i = begin; i < end; ++i) {
    around(engine, i);
    const auto own = [&](const at::Tensor& all) { return all.narrow(0, mesh.rank() * rows, rows).to(engine.device()); };
    engine.backward(model->forward(own(batches[i].tokens), own(batches[i].targets)));
    engine.step();
  }
  around(engine, end);
  const Gathered gathered(engine);
  return values_of(*model);
}

TEST_F(Gpu, ReplanningAndACheckpointKeepTheBits) {
  const TestFolder folder;
  for (const int ranks : {1, 2}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      on_ranks(ranks, [&](int rank, int port) {
        const Mesh mesh = mesh_of(rank, ranks, port, TransportChoice::kCudaHost);
        std::string wrong;
        for (const Placed& placed : kStrategies) {
          const Strategy strategy = strategy_of(placed, dtype, TransportChoice::kCudaHost);
          const std::string path = (folder / (name_of(placed) + std::to_string(ranks))).string();
          const auto expect_same = [&](const auto& got, const auto& wanted, const char* what) {
            for (std::size_t i = 0; i < wanted.size(); ++i) {
              if (!same_bits(got[i].second, wanted[i].second))
                wrong += name_of(placed) + ", " + what + ": " + got[i].first + "; ";
            }
          };
          const auto plain = trained_around(mesh, strategy, 0, 8, [](Engine&, int) {});
          const auto planned_anew = trained_around(mesh, strategy, 0, 8, [](Engine& engine, int i) {
            if (i % 3 == 2) engine.set_trainable("blocks.3.*", i > 3);
          });
          expect_same(planned_anew, plain, "planned anew");
          trained_around(mesh, strategy, 0, 5, [&](Engine& engine, int i) {
            if (i == 5) save_checkpoint(engine, path);
          });
          const auto loaded = trained_around(mesh, strategy, 5, 8, [&](Engine& engine, int i) {
            if (i == 5) load_checkpoint(engine, path);
          });
          expect_same(loaded, plain, "loaded");
        }
        return wrong;
      });
    }
  }
}

/// Two replicas that share a GPU make outer steps together. The bits are the same, however a replica's state is
/// sharded. A run that is saved between two outer steps continues from there. tests/optim/device_outer_test.cc compares
/// the device's results with the CPU's.
TEST_F(Gpu, OuterStepsGiveTheSameBitsUnderEveryStrategy) {
  const TestFolder folder;
  for (const int shards : {1, 2}) {
    for (const SyncType type :
         {SyncType::kLocalSgd, SyncType::kPostLocalSgd, SyncType::kDiloco, SyncType::kStreamingDiloco}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        on_ranks(2 * shards, [&](int rank, int port) {
          const Mesh mesh = mesh_of(rank, 2 * shards, port, TransportChoice::kCudaHost);
          std::string wrong;
          std::optional<Trained> first;
          for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                                              ShardingStrategy::kShardGradients, ShardingStrategy::kHybridShard}) {
            Strategy strategy = strategy_of(kind, dtype, TransportChoice::kCudaHost);
            strategy.mesh = {2, shards};
            strategy.sync.type = type;
            strategy.sync.every = 3;
            if (type == SyncType::kPostLocalSgd) strategy.sync.start_step = 2;
            if (type == SyncType::kStreamingDiloco) strategy.sync.fragments = 2;
            const std::string what = name_of(Placed(kind)) + ", sync " + std::to_string(static_cast<int>(type));
            const Trained trained = train_on(mesh, strategy, options_of(5));
            if (!first) first = trained;
            wrong += difference(trained, *first, what);
            if (!(trained.steps.back().planned == trained.steps.back().allocated))
              wrong += what + ": allocated is not planned; ";
            const std::string path = (folder / (what + std::to_string(shards) + std::string(name_of(dtype)))).string();
            const auto saved = trained_around(mesh, strategy, 0, 8, [&](Engine& engine, int i) {
              if (i == 5) save_checkpoint(engine, path);
            });
            const auto loaded = trained_around(mesh, strategy, 5, 8, [&](Engine& engine, int i) {
              if (i == 5) load_checkpoint(engine, path);
            });
            for (std::size_t i = 0; i < saved.size(); ++i) {
              if (!same_bits(loaded[i].second, saved[i].second)) wrong += what + ", loaded: " + saved[i].first + "; ";
            }
          }
          return wrong;
        });
      }
    }
  }
}

/// Ranks with common parameters have their shards in the host's memory, and the CPU updates them. A single rank gives
/// the bits of plain training. Several ranks that all take part in each step give these bits, too.
TEST_F(Gpu, AsynchronousRankAndRanksWithoutBackupsHaveTheBitsOfPlainTraining) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [ranks](int rank, int port) {
      const Mesh mesh = mesh_of(rank, ranks, port, TransportChoice::kCudaHost);
      Strategy strategy = strategy_of(ShardingStrategy::kShardOptimizer, DType::kF32, TransportChoice::kCudaHost);
      const Trained plain = train_on(mesh, strategy, options_of());
      strategy.sync.type = ranks == 1 ? SyncType::kAsynchronous : SyncType::kBackups;
      strategy.sync.backups = 0;
      const Trained trained = train_on(mesh, strategy, options_of());
      const bool is_planned = trained.steps.back().planned == trained.steps.back().allocated;
      return difference(trained, plain, "ranks with common parameters") +
             (is_planned ? "" : "allocated is not planned");
    });
  }
}

}  // namespace
}  // namespace tessera::testing
