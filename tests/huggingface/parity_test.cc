// Tests models of `transformers`. After they are read from their folders, they compute the same logits and gradients as
// in transformers. An exported model is equal to the model that was read, byte for byte.

#include <ATen/Functions.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>

#include "runtime/base/status.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tessera/deferred_init.h"
#include "tessera/engine.h"
#include "tessera/safetensors.h"
#include "tests/oracle/child.h"
#include "tests/oracle/exchange.h"
#include "tests/support/test_folder.h"
#include "workshop/models/hf_config.h"
#include "workshop/models/hf_names.h"
#include "workshop/models/language_model.h"

namespace tessera::models {
namespace {

namespace fs = std::filesystem;

class HuggingFace : public ::testing::Test {
 protected:
  /// One process makes all models, since most of the time goes to the import of transformers.
  static void SetUpTestSuite() {
    folder_.emplace();
    if (!oracle::python_has({"torch", "transformers"})) return;
    const auto made =
        oracle::run_python("../huggingface/make_models.py", {folder_->path().string()}, folder_->path(), 200);
    EXPECT_TRUE(made.ok()) << message_of(made.status());
    for (const auto& each : fs::directory_iterator(folder_->path()))
      if (each.is_directory()) names_.push_back(each.path().filename());
  }
  static void TearDownTestSuite() { folder_.reset(); }
  void SetUp() override {
    if (names_.empty()) GTEST_SKIP() << TESSERA_ORACLE_PYTHON " has no transformers. hint: scripts/setup --tests";
  }

  static std::map<std::string, at::Tensor> read(const std::string& name, const std::string& what) {
    const auto tensors = oracle::read_tensors(*folder_ / name / what);
    EXPECT_TRUE(tensors.ok()) << message_of(tensors.status());
    return {tensors->begin(), tensors->end()};
  }
  static ModelConfig config_of(const std::string& name) {
    const auto config = read_model_config(*folder_ / name / "model");
    EXPECT_TRUE(config.ok()) << message_of(config.status());
    return *config;
  }
  static double largest(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }

  static std::optional<TestFolder> folder_;
  static std::vector<std::string> names_;
};
std::optional<TestFolder> HuggingFace::folder_;
std::vector<std::string> HuggingFace::names_;

TEST_F(HuggingFace, LogitsLossAndGradientsEqualTransformers) {
  EXPECT_EQ(names_.size(), 10u);
  for (const std::string& name : names_) {
    SCOPED_TRACE(name);
    const ModelConfig config = config_of(name);
    const auto model = *make_language_model(config);
    EXPECT_EQ(parameter_count(config), [&] {
      std::int64_t count = 0;
      for (const auto& parameter : model->parameters()) count += parameter.numel();
      return count;
    }());
    import_safetensors(*model, *folder_ / name / "model", {.names = hf_names(config), .ignored = hf_ignored(config)});
    auto batch = read(name, "batch"), wanted = read(name, "wanted");
    const at::Tensor loss = model->forward(batch["tokens"], batch["targets"]);
    loss.backward();
    EXPECT_LT(largest(model->forward(batch["tokens"]), wanted["logits"]), 1e-5);
    EXPECT_NEAR(loss.item<double>(), wanted["loss"].item<double>(), 1e-6);
    for (const auto& item : model->named_parameters()) {
      const NameInFile in_file = hf_names(config)(item.key());
      at::Tensor gradient = wanted[in_file.names[0]];
      ASSERT_TRUE(gradient.defined()) << item.key();
      if (in_file.transposed && gradient.dim() == 2) gradient = gradient.t();
      EXPECT_LT(largest(item.value().grad(), gradient), 1e-5) << item.key();
    }
  }
}

TEST_F(HuggingFace, TransformersReadsExportedModels) {
  for (const std::string& name : names_) {
    SCOPED_TRACE(name);
    const ModelConfig config = config_of(name);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Strategy strategy;
      strategy.strategy = ShardingStrategy::kFullShard;
      const auto model = deferred_init([&] { return *make_language_model(config); });
      Engine engine(model, strategy, mesh);
      import_safetensors(engine, *folder_ / name / "model", {.names = hf_names(config), .ignored = hf_ignored(config)});
      export_safetensors(engine, *folder_ / name / "exported",
                         {.names = hf_names(config), .most_bytes = name == "llama" ? 20'000 : 1'000'000});
    });
    const auto text = to_hf_config(config, "float32");
    ASSERT_TRUE(text.ok()) << message_of(text.status());
    std::ofstream(*folder_ / name / "exported" / "config.json") << *text;
    const auto again = read_model_config(*folder_ / name / "exported");
    ASSERT_TRUE(again.ok()) << message_of(again.status());
    EXPECT_EQ(to_json(*again), to_json(config));
  }
  const auto checked =
      oracle::run_python("../huggingface/check_exports.py", {folder_->path().string()}, folder_->path(), 200);
  ASSERT_TRUE(checked.ok()) << message_of(checked.status());
  for (const std::string& name : names_) EXPECT_THAT(*checked, ::testing::HasSubstr(name + " "));
}

}  // namespace
}  // namespace tessera::models
