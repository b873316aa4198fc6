// Tests that models give the same results as an independent implementation in Python.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/randn.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "runtime/base/status.h"
#include "tests/models/model_tests.h"
#include "tests/oracle/child.h"
#include "tests/oracle/exchange.h"

namespace tessera::models {
namespace {

using oracle::NamedTensors;

// The same weights and tokens go through the C++ model and through tests/oracle/models.py, which was written
// independently. Logits, loss and every gradient must agree, and names and shapes must fit exactly.
class Parity : public ::testing::TestWithParam<std::pair<const char*, const char*>> {
 protected:
  void SetUp() override {
    if (!oracle::python_has_torch()) GTEST_SKIP() << TESSERA_ORACLE_PYTHON " has no torch";
    folder_ = std::filesystem::path(::testing::TempDir()) / ("parity_" + std::string(GetParam().first));
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  void write(const std::string& name, const NamedTensors& tensors) {
    const absl::Status status = oracle::write_tensors(folder_ / name, tensors);
    ASSERT_TRUE(status.ok()) << message_of(status);
  }

  std::map<std::string, at::Tensor> evaluate_in_python() {
    const std::string f = folder_.string();
    const std::string command = TESSERA_ORACLE_PYTHON " " TESSERA_ORACLE_FOLDER "/evaluate.py --init " + f +
                                "/init --batch " + f + "/batch --config " + f + "/model.json --out " + f + "/out";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    const auto result = oracle::read_tensors(folder_ / "out");
    EXPECT_TRUE(result.ok()) << message_of(result.status());
    return result.ok() ? std::map(result->begin(), result->end()) : std::map<std::string, at::Tensor>{};
  }

  std::filesystem::path folder_;
};

TEST_P(Parity, LogitsLossAndGradientsEqualTheReferenceModel) {
  const std::string text = GetParam().second;
  std::ofstream(folder_ / "model.json") << text;
  at::manual_seed(11);
  const auto made = make_language_model(*parse_model_config(text));
  ASSERT_TRUE(made.ok());
  LanguageModel& model = **made;
  NamedTensors weights;
  for (const auto& item : model.named_parameters()) {
    const at::NoGradGuard no_grad;
    item.value().add_(at::randn(item.value().sizes()), 0.05);  // else biases would be 0, and normalization weights 1
    weights.emplace_back(item.key(), item.value());
  }
  const at::Tensor tokens = random_tokens(3, 13), targets = random_tokens(3, 13, 2);
  write("init", weights);
  write("batch", {{"tokens", tokens}, {"targets", targets}});
  const auto wanted = evaluate_in_python();
  ASSERT_EQ(wanted.size(), weights.size() + 2);

  const at::Tensor loss = model.forward(tokens, targets);
  loss.backward();
  EXPECT_TRUE(at::allclose(model.forward(tokens), wanted.at("logits"), 1e-4, 1e-5));
  EXPECT_NEAR(loss.item<float>(), wanted.at("loss").item<float>(), 1e-5f);
  for (const auto& item : model.named_parameters()) {
    const at::Tensor difference = item.value().grad() - wanted.at(item.key());
    EXPECT_LT(difference.norm().item<float>(), 1e-4f * wanted.at(item.key()).norm().item<float>()) << item.key();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, Parity,
    ::testing::Values(
        std::pair("gpt", R"({"model": "gpt", "vocab_size": 61, "seq_len": 16, "layers": 2, "width": 32, "heads": 4})"),
        std::pair("gpt_tied", R"({"model": "gpt", "vocab_size": 61, "seq_len": 16, "layers": 2, "width": 32,
                                  "heads": 4, "mlp_ratio": 2, "bias": false, "tie_head": true})"),
        std::pair("llama", R"({"model": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
                               "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2})"),
        std::pair("llama_tied", R"({"model": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40,
                                    "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6,
                                    "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true})")),
    [](const auto& info) { return std::string(info.param.first); });

}  // namespace
}  // namespace tessera::models
