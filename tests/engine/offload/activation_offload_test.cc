// Tests offloading activations to disk. Training gives the same bits as a run with all activations in memory, for every
// strategy and whatever the program does. Memory of saved tensors is really freed. A disk that fails is an error, and
// never changes numbers.

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "engine/activations/activation_tier.h"
#include "engine/activations/saved_activations.h"
#include "offload/files/fault_plan.h"
#include "tessera/error.h"
#include "tessera/recompute.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"

namespace tessera::testing {
namespace activation_offload_test {

using ::testing::HasSubstr;

std::string scratch() { return std::filesystem::temp_directory_path().string(); }

/// Offloads all activations of at least `min_bytes`, with as little memory as possible.
void put_activations_below(Strategy& s, std::int64_t min_bytes = 1, std::int64_t queue_depth = 1) {
  s.offload.activations = Tier::kNvme;
  s.offload.activations_min_bytes = min_bytes;
  s.offload.paths = {scratch()};
  s.offload.record_bytes = 4096;
  s.offload.queue_depth = queue_depth;
}

OffloadConfig small_records() {
  Strategy strategy;
  put_activations_below(strategy);
  return strategy.offload;
}

/// Counts the bytes of living CPU tensors, and their maximum. There is one counter for the process, since LibTorch has
/// one allocator.
class CountingAllocator final : public c10::Allocator {
 public:
  static CountingAllocator& installed() {
    static CountingAllocator allocator;
    static const bool once = [] {
      c10::SetCPUAllocator(&allocator, 200);
      return true;
    }();
    static_cast<void>(once);
    return allocator;
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const base = static_cast<std::byte*>(std::aligned_alloc(kHead, (kHead + bytes + kHead - 1) / kHead * kHead));
    new (base) std::size_t(bytes);
    const std::int64_t now = live += static_cast<std::int64_t>(bytes);
    for (std::int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
    }
    return {base + kHead, base + kHead, &give_back, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  /// Returns the largest number of bytes in use at once while `body` runs, without the bytes in use now.
  std::int64_t peak_of(const std::function<void()>& body) {
    const std::int64_t before = live;
    peak = before;
    body();
    return peak - before;
  }

  inline static std::atomic<std::int64_t> live{0}, peak{0};

 private:
  static constexpr std::size_t kHead = 64;  ///< bytes before the data, which hold the size of the data
  static void give_back(void* data) {
    auto* const base = static_cast<std::byte*>(data) - kHead;
    live -= static_cast<std::int64_t>(*reinterpret_cast<std::size_t*>(base));
    std::free(base);
  }
};

// ---- Training -------------------------------------------------------------------------------------------------------

struct TrainingCase {
  DType dtype;
  int ranks;
  std::int64_t accumulation;
  TinyOptions model;
};

TinyOptions recomputed(TinyOptions model) {
  model.recompute = true;
  return model;
}

std::vector<TrainingCase> training_cases() {
  std::vector<TrainingCase> cases = {{DType::kF32, 1, 1, kWide},
                                     {DType::kF32, 2, 2, recomputed(kWide)},
                                     {DType::kBF16, 2, 1, kAwkward},
                                     {DType::kF16, 2, 1, kWide},
                                     {DType::kBF16, 3, 2, recomputed(kAwkward)}};
  cases.push_back({DType::kF32, 2, 1, recomputed(kWide)});
  cases.back().model.shared_block = true;
  return cases;
}

std::string name_of(const TrainingCase& one) {
  return std::string(tessera::name_of(one.dtype)) + " on " + std::to_string(one.ranks) + " ranks" +
         (one.model.recompute ? ", recomputed" : "");
}

TEST(ActivationOffload, TrainingHasTheBitsOfARunInMemory) {
  constexpr std::int64_t kQueueDepths[] = {1, 4};
  for (const auto& each : pairwise_of<2>(training_cases(), kOnePerPlacement, kQueueDepths)) {
    const TrainingCase& one = std::get<0>(each);
    const Placed& placed = std::get<1>(each);
    const std::int64_t queue_depth = std::get<2>(each);
    const std::string what = name_of(one) + ", " + name_of(placed);
    const TrainOptions options{.model = one.model, .steps = 4};
    const auto train = [&](bool offloads) {
      const Adjust adjust = [&](Strategy& s) {
        s.gradient_accumulation = one.accumulation;
        if (offloads) put_activations_below(s, 1, queue_depth);
        if (placed.on_disk) s.offload.queue_depth = queue_depth;
      };
      return train_on_threads({.ranks = one.ranks}, strategy_for(placed, adjust, one.dtype), options);
    };
    const Trained wanted = train(false);
    const Trained trained = train(true);
    expect_same_bits(trained, wanted, what);
    EXPECT_GT(trained.traffic.disk_bytes_written, 0) << what;
    if (queue_depth == 1) {
      EXPECT_GT(trained.traffic.disk_bytes_read, wanted.traffic.disk_bytes_read) << what;
    }
    // A block that is used twice and recomputed needs a bucket that is not in the plan, with or without offload.
    for (std::size_t i = 0; i < trained.steps.size(); ++i) {
      MemoryUse planned = wanted.steps[i].planned, allocated = wanted.steps[i].allocated;
      planned[MemoryCategory::kActivations] = allocated[MemoryCategory::kActivations] = (2 * queue_depth + 1) * 4096;
      EXPECT_EQ(trained.steps[i].planned, planned) << what;
      EXPECT_EQ(trained.steps[i].allocated, allocated) << what;
    }
  }
}

TEST(ActivationOffload, StatesOnDiskAndUpdatesInBackwardKeepTheBits) {
  const Kept kept{DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32};
  for (const bool in_backward : {false, true}) {
    const auto train = [&](bool offloads) {
      Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard, &kSomeBelow);
      if (in_backward) update_in_backward(strategy);
      if (offloads) put_activations_below(strategy);
      return train_on_threads({.ranks = 2}, strategy, {.model = kWide, .steps = 4});
    };
    expect_same_bits(train(true), train(false), in_backward ? "in backward" : "after backward");
  }
}

/// The program makes two losses from one forward and evaluates between steps. One of its forwards throws.
TEST(ActivationOffload, CallsAroundAStepKeepTheBits) {
  on_each_placement(2, [](const Mesh& mesh, const Strategy& plain) {
    const auto train = [&](const Strategy& strategy) {
      Session session(mesh, strategy, kWide);
      for (std::size_t i = 0; i < 3; ++i) {
        const at::Tensor loss = session.loss(i);
        session.engine.backward(loss * 0.5, {.retain_graph = true});
        session.engine.backward(loss * loss);
        {
          const torch::NoGradGuard no_grad;
          const std::int64_t written = session.engine.traffic().disk_bytes_written;
          session.loss(i + 1);
          EXPECT_EQ(session.engine.traffic().disk_bytes_written, written) << "nothing is saved there";
        }
        session.engine.step();
        EXPECT_THROW(
            {
              const at::Tensor unused = session.loss(i + 1);
              throw std::runtime_error("forward");
            },
            std::runtime_error);
      }
      return session.values();
    };
    Strategy below = plain;
    put_activations_below(below);
    EXPECT_TRUE(all_same_bits(train(below), train(plain))) << tessera::name_of(plain.strategy);
  });
}

TEST(ActivationOffload, OnlyTensorsAboveTheMinimumMove) {
  const auto bytes_written = [](std::int64_t min_bytes) {
    std::int64_t bytes = 0;
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Session session(
          mesh, strategy_for(ShardingStrategy::kNoShard, [&](Strategy& s) { put_activations_below(s, min_bytes); }),
          kWide);
      session.train(0);
      bytes = session.engine.traffic().disk_bytes_written;
    });
    return bytes;
  };
  constexpr std::int64_t kHidden = 24 * 5 * 64 * 4;  // bytes of the tensor that gelu saves, the largest of the model
  EXPECT_EQ(bytes_written(kHidden + 1), 0);
  EXPECT_GT(bytes_written(kHidden), 0);
  EXPECT_GT(bytes_written(1), bytes_written(kHidden));
}

/// Frozen and tied parameters are never moved to disk either.
TEST(ActivationOffload, ParametersAreNeverMoved) {
  on_placements(kInMemory, 2, [](const Mesh& mesh, const Strategy& plain) {
    Strategy strategy = plain;
    put_activations_below(strategy, 4096);
    Session session(mesh, strategy, kAwkward);
    const at::Tensor row = session.batches[0].tokens.narrow(0, 0, 1);  // a row's tensors are smaller than `min_bytes`
    for (int i = 0; i < 2; ++i) {
      session.engine.backward(session.model->forward(row, row));
      session.engine.step();
    }
    EXPECT_EQ(session.engine.traffic().disk_bytes_written, 0) << tessera::name_of(plain.strategy);
  });
}

TEST(ActivationOffload, AnotherThreadThanTheEnginesMayTrain) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kNoShard, [](Strategy& s) { put_activations_below(s); }),
                    kWide);
    std::thread([&] {
      session.train(0);
      const std::int64_t first = session.engine.traffic().disk_bytes_written;
      session.train(1);
      EXPECT_GT(session.engine.traffic().disk_bytes_written, first);
    }).join();
  });
}

TEST(ActivationOffload, PeakMemoryIsThatOfTheOperatorsUnderWay) {
  CountingAllocator& allocator = CountingAllocator::installed();
  const auto peak = [&](bool offloads) {
    std::int64_t bytes = 0;
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      const Adjust adjust = [&](Strategy& s) {
        s.memory.tensor_heap = false;
        if (offloads) put_activations_below(s, 4096);
      };
      TinyOptions model = kWide;
      model.blocks = 16;
      Session session(mesh, strategy_for(ShardingStrategy::kNoShard, adjust), model);
      session.train(0);
      bytes = allocator.peak_of([&] { session.train(1); });
    });
    return bytes;
  };
  const std::int64_t in_memory = peak(false), below = peak(true);
  EXPECT_LT(below, in_memory / 4) << below << " of " << in_memory;
}

// ---- What is saved --------------------------------------------------------------------------------------------------

/// Saves activations without an Engine, on this thread.
struct Offloading {
  explicit Offloading(std::size_t min_bytes = 1, std::vector<c10::Storage> staying = {})
      : activations(std::make_shared<SavedActivations>(
            nvme_activations(small_records(), 0),
            SavedActivationsOptions{.min_bytes = min_bytes, .staying = std::move(staying)})) {
    hook_saved_tensors(activations);
  }
  ActivationCounts counts() const { return activations->counts(); }
  std::shared_ptr<SavedActivations> activations;
};

at::Tensor leaf(at::IntArrayRef sizes) { return at::randn(sizes).requires_grad_(); }

/// Checks that gradients of `inputs` have the same bits with offloading and without. Returns the counts of activations
/// that were written.
ActivationCounts expect_same_gradients(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
                                       const std::vector<at::Tensor>& inputs) {
  const auto gradients = [&] { return torch::autograd::grad({function(inputs).sum()}, inputs); };
  const auto wanted = gradients();
  const Offloading offloading;
  const auto got = gradients();
  for (std::size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(same_bits(got[i], wanted[i])) << "input " << i;
  EXPECT_EQ(offloading.counts().live_bytes, 0) << "the graph has gone";
  return offloading.counts();
}

TEST(SavedActivations, TensorSavedBySeveralOperatorsIsStoredOnce) {
  const ActivationCounts counts = expect_same_gradients(
      [](const auto& in) {
        const at::Tensor x = in[0] * 2;
        return x.sin() + x.cos() + x * x;
      },
      {leaf({64, 64})});
  EXPECT_EQ(counts.bytes_put, 64 * 64 * 4);
  EXPECT_EQ(counts.bytes_got, 64 * 64 * 4) << "and brought back once, since its users share it";
}

TEST(SavedActivations, PartsOfAFusedTensorAreStoredAsOne) {
  const ActivationCounts counts = expect_same_gradients(
      [](const auto& in) {
        const auto parts = (in[0] * 2).chunk(3, 1);
        return (parts[0] * parts[1]).sigmoid() * parts[2];
      },
      {leaf({32, 96})});
  EXPECT_EQ(counts.bytes_put, (32 * 96 + 32 * 32) * 4) << "the whole, and the sigmoid's result";
  EXPECT_EQ(counts.bytes_got, counts.bytes_put);
}

TEST(SavedActivations, DisjointPartsAreStoredSeparately) {
  const ActivationCounts counts = expect_same_gradients(
      [](const auto& in) {
        const at::Tensor x = in[0] * 2;
        return x.narrow(0, 0, 4).sin() + x.narrow(0, 8, 4).cos();
      },
      {leaf({32, 32})});
  EXPECT_EQ(counts.bytes_put, 2 * 4 * 32 * 4);
}

/// Backward may not use the tensor that the first operator saved, since that tensor was changed afterwards. Backward
/// may use the tensor that the second operator saved.
TEST(SavedActivations, EachVersionOfATensorIsStored) {
  const at::Tensor input = leaf({64, 64});
  const auto gradient = [&] {
    at::Tensor early, late;
    {
      at::Tensor x = input * 2;
      early = x.sin();
      x.add_(1);
      late = x.cos();
    }
    return torch::autograd::grad({late.sum()}, {input})[0];
  };
  const at::Tensor wanted = gradient();
  const Offloading offloading;
  EXPECT_TRUE(same_bits(gradient(), wanted));
  EXPECT_EQ(offloading.counts().values, 2);
}

TEST(SavedActivations, ThinSliceOfATensorStaysInMemory) {
  const ActivationCounts counts =
      expect_same_gradients([](const auto& in) { return (in[0] * 2).select(1, 3).sin(); }, {leaf({32, 96})});
  EXPECT_EQ(counts.values, 0);
}

TEST(SavedActivations, LayoutsAreRestored) {
  const auto strange = [](const std::vector<at::Tensor>& in) {
    const at::Tensor x = in[0] * 2;
    const at::Tensor turned = x.transpose(0, 1) * x.t();
    const at::Tensor row = x.narrow(0, 3, 4);
    const at::Tensor wide = x.select(0, 5).unsqueeze(0).expand({7, x.size(1)});
    const at::Tensor strided = at::as_strided(x, {10, 12}, {2, 1}, 5);
    return turned.sin().sum() + (row * row).sum() + (wide * wide.sin()).sum() + (strided * strided).sum();
  };
  expect_same_gradients(strange, {leaf({33, 21})});
  const at::Tensor complex = at::complex(at::randn({8, 8}), at::randn({8, 8})).requires_grad_();
  expect_same_gradients([](const auto& in) { return at::real((in[0] * 2).conj() * (in[0] * 3).sin()); }, {complex});
}

TEST(SavedActivations, LeavesBuffersAndSmallTensorsStayInMemory) {
  const at::Tensor weight = leaf({32, 32}), buffer = at::randn({32, 32});
  const Offloading offloading(32 * 32 * 4, {buffer.storage()});
  const at::Tensor product = weight.sin() + weight * buffer;
  EXPECT_EQ(offloading.counts().values, 0);
  const at::Tensor small = (product.narrow(0, 0, 31) * 2).sin();
  EXPECT_EQ(offloading.counts().values, 0);
  const at::Tensor large = (product * 2).sin();
  EXPECT_EQ(offloading.counts().values, 1);
  const torch::NoGradGuard no_grad;
  (product * 2).sin();
  EXPECT_EQ(offloading.counts().values, 1);
}

TEST(SavedActivations, WritingASavedTensorIsLibTorchsError) {
  for (const std::size_t min_bytes : {1U, 1U << 30}) {  // the tensor is offloaded, then kept in memory
    const Offloading offloading(min_bytes);
    const at::Tensor input = leaf({64, 64});
    at::Tensor x = input * 2;
    const at::Tensor loss = x.sin().sum();
    x.add_(1);
    EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("modified by an inplace operation")) << min_bytes;
  }
}

/// A function whose backward overwrites its saved tensor.
struct WritesItsInput : torch::autograd::Function<WritesItsInput> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    context->get_saved_variables()[0].detach().zero_();
    return {gradients[0]};
  }
};

TEST(SavedActivations, WriteInBackwardIsNoticedByOtherUsers) {
  const auto run = [] {
    const at::Tensor input = leaf({64, 64});
    at::Tensor loss;
    {
      const at::Tensor x = input * 2;
      const at::Tensor early = x.sin();
      loss = (early + WritesItsInput::apply(x)).sum();
    }
    loss.backward();
  };
  const std::string wanted = error_of(run);
  EXPECT_THAT(wanted, HasSubstr("modified by an inplace operation")) << "in plain LibTorch";
  const Offloading offloading;
  EXPECT_THAT(error_of(run), HasSubstr("modified by an inplace operation"));
}

TEST(SavedActivations, GraphRunsTwiceAndOutlivesTheOffload) {
  const at::Tensor input = leaf({64, 64});
  const auto wanted = torch::autograd::grad({(input * 2).sin().sum()}, {input});
  at::Tensor loss;
  {
    const Offloading offloading;
    loss = (input * 2).sin().sum();
    EXPECT_EQ(offloading.counts().live_bytes, 64 * 64 * 4);
    for (int i = 0; i < 2; ++i) {
      const auto got = torch::autograd::grad({loss}, {input}, {}, /*retain_graph=*/true);
      EXPECT_TRUE(same_bits(got[0], wanted[0]));
    }
  }
  EXPECT_TRUE(same_bits(torch::autograd::grad({loss}, {input})[0], wanted[0]));
  EXPECT_THAT(error_of([&] { loss.backward(); }), HasSubstr("second time"));
}

TEST(SavedActivations, RecomputedTensorsStayInMemory) {
  const at::Tensor input = leaf({64, 64});
  const Offloading offloading;
  const auto run = [](const at::Tensor& x) { return ((x * 2).sin() * 3).cos(); };
  const at::Tensor loss = tessera::checkpoint(run, input * 2).sum();
  EXPECT_EQ(offloading.counts().values, 1) << "the region's input";
  loss.backward();
  EXPECT_EQ(offloading.counts().values, 1) << "and nothing that it computes again";
}

/// A worker of a DataLoader may build graphs, but the disk belongs to its parent.
TEST(SavedActivations, ForkedProcessDoesNotOffload) {
  const at::Tensor input = leaf({64, 64});
  const auto before = [&] { return (input * 2).sin().sum(); };
  const Offloading offloading;
  const at::Tensor loss = before();
  const pid_t child = ::fork();
  if (child == 0) {
    offloading.activations->enter_forked_process();
    before().backward();
    const bool kept = offloading.counts().values == 1;
    const bool refused = error_of([&] { loss.backward(); }).find("forked") != std::string::npos;
    ::_exit(kept && refused ? 7 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  loss.backward();
}

TEST(SavedActivations, LastLivingOffloadTakesTheTensors) {
  const Offloading first;
  const auto save = [] { (leaf({64, 64}) * 2).sin().sum().backward(); };
  {
    const Offloading second;
    hook_saved_tensors(first.activations);  // this hook is known already
    save();
    EXPECT_EQ(second.counts().values, 1);
    EXPECT_EQ(first.counts().values, 0);
  }
  save();
  EXPECT_EQ(first.counts().values, 1);
}

TEST(SavedActivations, OtherThreadsDoNotOffload) {
  const Offloading offloading;
  std::thread([] { (leaf({64, 64}) * 2).sin().sum().backward(); }).join();
  EXPECT_EQ(offloading.counts().values, 0);
}

// ---- Faults ---------------------------------------------------------------------------------------------------------

TEST(ActivationOffload, EveryFaultIsAnErrorAndNeverWrongNumbers) {
  struct Kind {
    FaultSite site;
    FaultAction action;
    std::int64_t number;
    const char* text;  ///< the error's text; null if the transfer is continued
  };
  const Kind kinds[] = {{FaultSite::kWrite, FaultAction::kErrno, EIO, "Input/output error (errno 5)"},
                        {FaultSite::kRead, FaultAction::kErrno, EIO, "Input/output error (errno 5)"},
                        {FaultSite::kReserve, FaultAction::kErrno, ENOSPC, "No space left on device (errno 28)"},
                        {FaultSite::kWrite, FaultAction::kErrno, ENOSPC, "No space left on device (errno 28)"},
                        {FaultSite::kRead, FaultAction::kBitFlip, 100, "was written"},
                        {FaultSite::kRead, FaultAction::kShort, 512, nullptr},
                        {FaultSite::kWrite, FaultAction::kShort, 512, nullptr}};
  const auto train = [](int ranks) {
    return of_rank_zero({.ranks = ranks}, [&](const Mesh& mesh) {
      const Adjust adjust = [](Strategy& s) {
        put_activations_below(s);
        s.offload.verify = true;
      };
      TinyOptions model;
      model.blocks = 2;
      return trained(mesh, strategy_for(ShardingStrategy::kFullShard, adjust), 2, model);
    });
  };
  const Values wanted = train(1);
  for (const Kind& kind : kinds) {
    std::int64_t operations = 0;
    {
      ScopedFaults counting({});
      train(1);
      operations = counting.plan().operations(kind.site);
    }
    int failed = 0;
    for (std::int64_t nth = 1; nth <= operations; ++nth) {
      ScopedFaults failing({{.site = kind.site, .nth = nth, .action = kind.action, .number = kind.number}});
      Values got;
      const std::string error = error_of([&] { got = train(1); });
      if (error.empty()) {
        EXPECT_TRUE(all_same_bits(got, wanted)) << "fault " << nth << " of " << operations;
        continue;
      }
      ++failed;
      ASSERT_NE(kind.text, nullptr) << error;
      EXPECT_THAT(error, HasSubstr(kind.text)) << nth;
      EXPECT_THAT(error, HasSubstr("rank 0 activations")) << nth;
      EXPECT_THAT(error, HasSubstr(scratch())) << nth;
    }
    if (kind.text) {
      EXPECT_GT(failed, 0) << kind.text;
    }
  }
}

/// One rank's disk fails, and all ranks end with its error.
TEST(ActivationOffload, FailedDiskOfOneRankEndsAllRanks) {
  for (const FaultSite site : {FaultSite::kReserve, FaultSite::kRead}) {
    ScopedFaults failing({{.site = site, .nth = 1, .action = FaultAction::kErrno, .number = EIO}});
    const std::string error = error_of([&] {
      run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
        trained(mesh, strategy_for(ShardingStrategy::kFullShard, [](Strategy& s) { put_activations_below(s); }), 2,
                kWide);
      });
    });
    EXPECT_THAT(error, HasSubstr("Input/output error (errno 5)"));
  }
}

TEST(ActivationOffload, UnsupportedKeysAreRefused) {
  const auto error = [](const Adjust& adjust) {
    return error_of([&] {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        const Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust));
      });
    });
  };
  EXPECT_THAT(error([](Strategy& s) { s.offload.activations = Tier::kHost; }),
              HasSubstr("\"host\" is for a GPU's activations"));
  EXPECT_THAT(error([](Strategy& s) { s.offload.activations = Tier::kNvme; }), HasSubstr("/offload/paths"));
  EXPECT_THAT(error([](Strategy& s) {
                put_activations_below(s);
                s.offload.paths = {"/nowhere/at/all"};
              }),
              HasSubstr("/nowhere/at/all"));
}

}  // namespace activation_offload_test
}  // namespace tessera::testing
