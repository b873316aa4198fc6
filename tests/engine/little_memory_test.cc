// A model trains with masters and moments on disk and updates in backward, although its training state is many times
// the memory that the process may allocate. A second model trains with its parameters on disk too. These parameters
// alone take twice the memory that the process may allocate. The second model also writes its weights to a file, as a
// dictionary and as an archive.

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/deferred_init.h"
#include "tessera/engine.h"
#include "tessera/error.h"
#include "tessera/weights.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace {

constexpr std::int64_t kWidth = 1024, kLayers = 48;
constexpr std::int64_t kParameters = kLayers * kWidth * (kWidth + 1);
/// Bytes of bf16 parameters with fp32 masters, gradients and two moments.
constexpr std::int64_t kStateBytes = 16 * kParameters;

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    register_module("layers", layers);
    for (std::int64_t i = 0; i < kLayers; ++i) layers->push_back(torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = layer->as<torch::nn::LinearImpl>()->forward(x).tanh();
    return x.to(at::kFloat).pow(2).mean();
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Layers);

enum class OnDisk { kNothing, kStates, kAll };

Strategy strategy(OnDisk on_disk) {
  Strategy s;
  s.strategy = ShardingStrategy::kFullShard;
  s.units.classes = {"Linear"};
  s.mixed_precision.param = DType::kBF16;
  if (on_disk == OnDisk::kNothing) return s;
  s.optimizer.in_backward = true;
  s.offload.masters = s.offload.moments = {Tier::kNvme, 1.0};
  if (on_disk == OnDisk::kAll) s.offload.parameters.tier = Tier::kNvme;
  s.offload.paths = {std::filesystem::temp_directory_path().string()};
  s.offload.record_bytes = 256 << 10;
  return s;
}

std::int64_t allocated_now() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmData:")) return std::stoll(line.substr(7)) * 1024;
  }
  return -1;
}

/// Trains in a process that may allocate `bytes` more than it has allocated now. If `writes_weights`, it then writes
/// files of weights. Ends the process with 0, or with the error's exit code and its text on standard error.
[[noreturn]] void train_in(std::int64_t bytes, OnDisk on_disk, bool writes_weights = false) {
  torch::set_num_threads(1);
  at::ones({64, 64}).matmul(at::ones({64, 64}));  // this takes memory that LibTorch allocates once
  const rlim_t limit = static_cast<rlim_t>(allocated_now() + bytes);
  const rlimit both{limit, limit};
  try {
    if (setrlimit(RLIMIT_DATA, &both) != 0) throw std::runtime_error("setrlimit failed");
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      torch::set_num_threads(1);  // operators use one thread, since stacks of more threads take memory too
      Layers model = [] {
        const DeferredInitScope deferred;
        return Layers();
      }();
      Engine engine(model, strategy(on_disk), mesh);
      const at::Tensor x = at::ones({1, kWidth}, at::kBFloat16);
      double first = 0, last = 0;
      for (int step = 0; step < 3; ++step) {
        engine.backward(model->forward(x));
        last = engine.step().loss;
        if (step == 0) first = last;
      }
      if (!(last < first)) throw std::runtime_error("the loss did not fall");
      if (!writes_weights) return;
      const TestFolder folder;
      for (const WeightsForm form : {WeightsForm::kDictionary, WeightsForm::kArchive}) {
        save_weights(engine, folder / "weights.pt", form);
        if (std::filesystem::file_size(folder / "weights.pt") < 2 * kParameters)
          throw std::runtime_error("the file lacks parameters");
      }
    });
  } catch (const Error& error) {
    std::cerr << error.message() << std::endl;
    std::_Exit(static_cast<int>(error.exit_code()));
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    std::_Exit(1);
  }
  std::_Exit(0);
}

TEST(LittleMemory, ModelWithStateOfFourTimesTheMemoryTrains) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(train_in(kStateBytes / 4, OnDisk::kStates), ::testing::ExitedWithCode(0), "");
}

TEST(LittleMemory, ModelWithParametersOfTwiceTheMemoryTrainsAndWritesItsWeights) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  // Parameters take 2 bytes each.
  EXPECT_EXIT(train_in(kParameters, OnDisk::kAll, /*writes_weights=*/true), ::testing::ExitedWithCode(0), "");
}

// This test shows that the limits above have an effect.
TEST(LittleMemory, SameModelsFailByNameWithoutOffload) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fails = ::testing::ExitedWithCode(static_cast<int>(ExitCode::kOsResource));
  EXPECT_EXIT(train_in(kStateBytes / 4, OnDisk::kNothing), fails, "cannot allocate .* for ");
  EXPECT_EXIT(train_in(kParameters, OnDisk::kStates), fails, "cannot allocate .* for ");
}

}  // namespace
}  // namespace tessera::testing
