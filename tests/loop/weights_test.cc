// Tests weights in files. They are the module's weights under every strategy and in both forms of file (dictionary and
// archive). LibTorch and Python can read these files, and files that LibTorch writes can be loaded. A file that cannot
// be written is an error on all ranks.

#include "tessera/weights.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <filesystem>
#include <fstream>

#include "tessera/error.h"
#include "tests/oracle/child.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Weights : public ::testing::Test {
 protected:
  /// Reads the file with LibTorch.
  static c10::Dict<c10::IValue, c10::IValue> dictionary_of(const fs::path& path) {
    const std::string bytes = TestFolder::content_of(path);
    return torch::jit::pickle_load({bytes.begin(), bytes.end()}).toGenericDict();
  }

  TestFolder folder_;
};

TEST_F(Weights, SavedWeightsAreTheModulesUnderEveryStrategy) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Placed& placed : kOnePerPlacement) {
        SCOPED_TRACE(name_of(placed));
        const fs::path path = folder_ / "weights.pt";
        run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
          Session session(mesh, strategy_for(placed, nullptr, dtype), {.tied_head = true, .frozen_first_block = true});
          session.train(0);
          save_weights(session.engine, path);
          session.train(1);  // the Engine still trains
          save_weights(session.engine, path);
          const Values values = session.values();
          if (!mesh.is_main()) return;
          const auto file = dictionary_of(path);
          EXPECT_EQ(file.size(), values.size());
          for (const auto& [name, value] : values) {
            const at::Tensor stored = file.at(name).toTensor();
            EXPECT_EQ(stored.scalar_type(), dtype == DType::kF32 ? at::kFloat : at::kBFloat16);
            EXPECT_TRUE(at::equal(stored.to(at::kFloat), value)) << name;
          }
          Tiny other = make_tiny({.tied_head = true}, false);
          load_weights(other, path);
          EXPECT_TRUE(all_same_bits(values_of(*other), values));
          EXPECT_FALSE(fs::exists(path.string() + ".partial"));
        });
      }
    }
  }
}

/// Reads the file with plain LibTorch: torch::load needs a model with the dtype of the file.
Tiny read_plainly(const fs::path& path, const TinyOptions& options, DType dtype) {
  Tiny plain = make_tiny(options, false);
  if (dtype == DType::kBF16) plain->to(at::kBFloat16);
  torch::load(plain, path.string());
  return plain;
}

TEST_F(Weights, ArchiveIsReadByTorchLoadUnderEveryStrategy) {
  const TinyOptions options{.tied_head = true, .frozen_first_block = true};
  for (const int ranks : {1, 2, 3}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Placed& placed : kOnePerPlacement) {
        SCOPED_TRACE(name_of(placed));
        const fs::path path = folder_ / "archive.pt";
        run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
          Session session(mesh, strategy_for(placed, nullptr, dtype), options);
          session.train(0);
          save_weights(session.engine, path, WeightsForm::kArchive);
          session.train(1);  // the Engine still trains
          save_weights(session.engine, path, WeightsForm::kArchive);
          const Values values = session.values();
          if (!mesh.is_main()) return;
          const Tiny plain = read_plainly(path, options, dtype);
          EXPECT_TRUE(all_same_bits(values_of(*plain), values));
          EXPECT_EQ(plain->head.scalar_type(), dtype == DType::kF32 ? at::kFloat : at::kBFloat16);
          Tiny other = make_tiny(options, false);
          load_weights(other, path);
          EXPECT_TRUE(all_same_bits(values_of(*other), values));
        });
      }
    }
  }
}

TEST_F(Weights, TorchSavesFileIsLoadedUnderEveryStrategy) {
  const fs::path path = folder_ / "plain.pt";
  const TinyOptions options{.tied_head = true};
  Tiny plain = make_tiny(options, false);
  {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : plain->parameters()) parameter.mul_(1.25).add_(0.01);
  }
  // The numbers are exact in bf16 too, so no value is rounded.
  plain->to(at::kBFloat16);
  plain->to(at::kFloat);
  torch::save(plain, path.string());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    if (dtype == DType::kBF16) plain->to(at::kBFloat16);
    const Values wanted = values_of(*plain);
    for (const int ranks : {1, 2, 3}) {
      on_each_placement(
          ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            Session session(mesh, strategy, options);
            session.train(0);
            load_weights(session.engine, path);
            EXPECT_TRUE(all_same_bits(session.values(), wanted));
            session.train(1);
          },
          nullptr, dtype);
    }
  }
}

TEST_F(Weights, LoadsUnderAGuardOrBeforeTheEngineReachAllRanks) {
  const fs::path path = folder_ / "plain.pt";
  const Tiny plain = make_tiny({}, false);
  plain->head.set_data(plain->head.mul(3).detach());
  torch::save(plain, path.string());
  on_each_placement(2, [&](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy);
    session.train(0);
    {
      Gathered gathered(session.engine, Gathered::kWrite);
      load_weights(session.model, path);
      gathered.close();
    }
    EXPECT_TRUE(all_same_bits(session.values(), values_of(*plain)));
    Tiny before = make_tiny({}, false);
    load_weights(before, path);
    Engine engine(before, strategy, mesh);
    Gathered gathered(engine);
    EXPECT_TRUE(all_same_bits(values_of(*before), values_of(*plain)));
  });
}

struct WithBuffersImpl : torch::nn::Module {
  /// Plain torch::load expects a value for each registered buffer.
  explicit WithBuffersImpl(bool has_absent = true) {
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    linear = register_module("linear", torch::nn::Linear(4, 2));
    strided = register_buffer("strided", at::arange(6, at::kLong).view({2, 3}).t());
    if (has_absent) absent = register_buffer("absent", at::Tensor());
    register_buffer("empty", at::zeros({0, 3}));
  }
  at::Tensor forward(const at::Tensor& x) { return linear(norm(x)); }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear linear{nullptr};
  at::Tensor strided, absent;
};
TORCH_MODULE(WithBuffers);

TEST_F(Weights, SavedBuffersAreRankZeros) {
  const fs::path path = folder_ / "buffers.pt";
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    WithBuffers model;
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.units.classes = {};
    Engine engine(model, strategy, mesh);
    model->norm->running_mean.fill_(mesh.rank() + 1.0);
    for (const WeightsForm form : {WeightsForm::kDictionary, WeightsForm::kArchive}) {
      save_weights(engine, path, form);
      if (!mesh.is_main()) continue;
      WithBuffers other;
      other->strided.zero_();
      load_weights(other, path);
      EXPECT_TRUE(at::equal(other->norm->running_mean, at::ones({4})));
      EXPECT_TRUE(at::equal(other->named_buffers()["strided"], at::arange(6, at::kLong).view({2, 3}).t()));
      EXPECT_EQ(other->named_buffers()["empty"].sizes(), (std::vector<std::int64_t>{0, 3}));
      if (form == WeightsForm::kDictionary) {
        EXPECT_EQ(dictionary_of(path).size(), 9u);
        continue;
      }
      WithBuffers plain(false);
      torch::load(plain, path.string());
      EXPECT_TRUE(at::equal(plain->norm->running_mean, at::ones({4})));
      EXPECT_TRUE(at::equal(plain->strided, at::arange(6, at::kLong).view({2, 3}).t()));
    }
  });
}

TEST_F(Weights, PythonReadsSavedFiles) {
  if (!oracle::python_has_torch()) GTEST_SKIP() << "Python without torch";
  const std::string dictionary = (folder_ / "weights.pt").string(), archive = (folder_ / "archive.pt").string();
  std::string wanted;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard), {.tied_head = true});
    session.train(0);
    save_weights(session.engine, dictionary, WeightsForm::kDictionary);
    save_weights(session.engine, archive, WeightsForm::kArchive);
    double sum = 0;
    for (const auto& [name, value] : session.values()) sum += value.to(at::kDouble).abs().sum().item<double>();
    if (mesh.is_main()) wanted = std::to_string(sum) + " True\n";
  });
  const auto printed =
      oracle::run_python("read_weights.py", {"head", "embedding.weight", dictionary, "dictionary", archive, "archive"},
                         folder_.path(), 60);
  ASSERT_TRUE(printed.ok()) << printed.status();
  EXPECT_EQ(*printed, wanted + wanted);
}

/// Checks that all ranks get an error with this code and text, and that the Engine still trains.
void expect_failure(const fs::path& path, Existing existing, ExitCode code, const std::string& text) {
  for (const int ranks : {1, 3}) {
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
      session.train(0);
      const std::string told = error_of(code, [&] { save_weights(session.engine, path, existing); });
      EXPECT_THAT(told, HasSubstr("rank 0: "));
      EXPECT_THAT(told, HasSubstr(text));
      session.train(1);
    });
  }
}

TEST_F(Weights, RankZerosFailedWriteIsAnErrorOnAllRanks) {
  expect_failure(folder_ / "nowhere" / "w.pt", Existing::kReplaced, ExitCode::kCannotCreate, "nowhere");
  std::ofstream(folder_ / "old.pt") << "old";
  expect_failure(folder_ / "old.pt", Existing::kKept, ExitCode::kCannotCreate, "old.pt.partial");
  EXPECT_EQ(TestFolder::content_of(folder_ / "old.pt"), "old");
  EXPECT_EQ(dictionary_of(folder_ / "old.pt.partial").size(), 20u);  // no value is lost
  // The partial file's name is a link to a full disk.
  fs::create_symlink("/dev/full", folder_ / "full.pt.partial");
  expect_failure(folder_ / "full.pt", Existing::kReplaced, ExitCode::kCannotCreate, "full.pt.partial");
}

TEST_F(Weights, MismatchedFileIsRefusedWithAllNames) {
  const fs::path path = folder_ / "w.pt";
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kNoShard));
    save_weights(session.engine, path);
  });
  Tiny other = make_tiny({.width = 13, .blocks = 4}, false);
  const std::string told = error_of(ExitCode::kCorruptData, [&] { load_weights(other, path); });
  EXPECT_THAT(told, HasSubstr("\"blocks.3.up.weight\": missing in the file"));
  EXPECT_THAT(told, HasSubstr("\"head\": the model wants the shape [19, 13], the file has [19, 12]"));
  EXPECT_THROW(load_weights(other, folder_ / "none.pt"), Error);
  // Either all values are loaded, or no value is.
  EXPECT_EQ(other->named_parameters()["head"].sizes(), (std::vector<std::int64_t>{19, 13}));
}

struct PairImpl : torch::nn::Module {
  explicit PairImpl(bool tied) {
    const at::Tensor one = register_parameter("one", at::ones({3}));
    register_parameter("other", tied ? one : at::full({3}, 2.0));
  }
};
TORCH_MODULE(Pair);

TEST_F(Weights, TiedParameterStoredTwiceMustHaveOneValue) {
  const fs::path path = folder_ / "pair.pt";
  Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
  strategy.units.classes = {};
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Pair untied(false);
    Engine engine(untied, strategy, mesh);
    save_weights(engine, path);
    Pair tied(true);
    EXPECT_THAT(error_of(ExitCode::kCorruptData, [&] { load_weights(tied, path); }),
                HasSubstr("\"other\": it has other values than \"one\""));
  });
}

// The file has one storage for two parameters, which the optimizer would update separately.
TEST_F(Weights, TensorsSharingAStorageInTheFileGetOwnMemory) {
  const fs::path path = folder_ / "views.pt";
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor both = at::arange(3, type);
    c10::Dict<std::string, at::Tensor> weights;
    weights.insert("one", both);
    weights.insert("other", type == at::kFloat ? both : both.narrow(0, 1, 1).expand({3}));
    const std::vector<char> bytes = torch::pickle_save(weights);
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    Pair pair(false);
    load_weights(pair, path);
    const auto parameters = pair->named_parameters();
    for (const auto& item : parameters) {
      EXPECT_EQ(item.value().scalar_type(), type);
      EXPECT_TRUE(item.value().is_contiguous()) << item.key();
    }
    EXPECT_FALSE(parameters["one"].is_alias_of(parameters["other"]));
    EXPECT_TRUE(at::equal(parameters["one"], both));
    EXPECT_TRUE(at::equal(parameters["other"], weights.at("other")));
  }
}

TEST_F(Weights, DeferredModuleIsToldToLoadIntoItsEngine) {
  const fs::path path = folder_ / "w.pt";
  const Tiny plain = make_tiny({}, false);
  torch::save(plain, path.string());
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Tiny deferred = make_tiny({}, true);
    EXPECT_THAT(usage_error_of([&] { load_weights(deferred, path); }), HasSubstr("has no memory yet"));
    Engine engine(deferred, strategy_for(ShardingStrategy::kFullShard), mesh);
    load_weights(engine, path);
    Gathered gathered(engine);
    EXPECT_TRUE(all_same_bits(values_of(*deferred), values_of(*plain)));
  });
}

}  // namespace
}  // namespace tessera::testing
