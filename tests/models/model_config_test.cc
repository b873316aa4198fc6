// Tests how model configs are read, checked and written, and that the page of models is up to date.

#include "workshop/models/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "runtime/base/status.h"
#include "workshop/models/language_model.h"
#include "workshop/models/model_docs.h"

namespace tessera::models {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kGpt[] = R"({"model": "gpt", "vocab_size": 61, "seq_len": 16, "layers": 2, "width": 32, "heads": 4,
                            "dropout": 0.25, "bias": false, "tie_head": true})";
constexpr char kLlama[] = R"({"model": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 5e5})";

std::string errors_of(const std::string& text) {
  const auto config = parse_model_config(text, "m.json");
  EXPECT_FALSE(config.ok()) << text;
  if (config.ok()) return "";
  EXPECT_EQ(exit_code_of(config.status()), ExitCode::kConfig);
  return message_of(config.status());
}

TEST(ModelConfig, ReadsGpt) {
  const auto config = parse_model_config(kGpt);
  ASSERT_TRUE(config.ok()) << message_of(config.status());
  const auto& gpt = std::get<GPTConfig>(*config);
  EXPECT_EQ(gpt.vocab_size, 61);
  EXPECT_EQ(gpt.heads, 4);
  EXPECT_EQ(gpt.mlp_ratio, 4);
  EXPECT_EQ(gpt.dropout, 0.25);
  EXPECT_FALSE(gpt.bias);
  EXPECT_TRUE(gpt.tie_head);
}

TEST(ModelConfig, ReadsLlama) {
  const auto config = parse_model_config(kLlama);
  ASSERT_TRUE(config.ok()) << message_of(config.status());
  const auto& llama = std::get<LlamaConfig>(*config);
  EXPECT_EQ(llama.key_value_heads(), 2);
  EXPECT_EQ(llama.head_size(), 8);
  EXPECT_EQ(llama.rope.theta, 5e5);
  EXPECT_EQ(llama.max_position_embeddings, 2048);
}

TEST(ModelConfig, ReportsAllErrorsAtOnce) {
  const std::string errors = errors_of(R"({"model": "gpt", "vocab_size": "many", "seq_len": 0, "layer": 2,
    "width": 30, "heads": 4, "dropout": 1.0, "bias": 1})");
  EXPECT_THAT(errors, AllOf(HasSubstr("/vocab_size: must be an integer"), HasSubstr("/seq_len: must be an integer"),
                            HasSubstr("/layers: is needed"), HasSubstr("did you mean \"layers\""),
                            HasSubstr("/dropout: must be a number"), HasSubstr("/bias: must be true or false")));
  EXPECT_THAT(errors, HasSubstr("/width: must be a multiple of heads: 30 is not one of 4"));
}

TEST(ModelConfig, TextThatDescribesNoModelIsRefused) {
  EXPECT_THAT(errors_of("[1]"), HasSubstr("must be an object"));
  EXPECT_THAT(errors_of("{}"), HasSubstr("/model: is needed"));
  EXPECT_THAT(errors_of(R"({"model": "gtp"})"), HasSubstr("did you mean \"gpt\""));
  EXPECT_THAT(errors_of(R"({"model": )"), HasSubstr("m.json:1"));
  EXPECT_THAT(errors_of(std::string(kGpt).insert(1, R"("vocab_size": 1, )")), HasSubstr("vocab_size"));
  EXPECT_THAT(errors_of(R"({"model": "gpt", "vocab_size": 18446744073709551615, "seq_len": 1.5, "layers": 1, "width": 1,
    "heads": 1})"),
              AllOf(HasSubstr("/vocab_size"), HasSubstr("/seq_len")));
}

TEST(ModelConfig, RefusesLlamaHeadsThatDoNotDivide) {
  const auto with = [](const std::string& key, const std::string& value) {
    std::string text = kLlama;
    const std::size_t at = text.find("\"" + key + "\": ") + key.size() + 4;
    return text.replace(at, text.find_first_of(",}", at) - at, value);
  };
  EXPECT_THAT(errors_of(with("num_key_value_heads", "3")), HasSubstr("3 does not divide 4"));
  EXPECT_THAT(errors_of(with("hidden_size", "30")), HasSubstr("30 is not one of 4"));
  EXPECT_THAT(errors_of(with("hidden_size", "12")), HasSubstr("must be even: it is 3"));
}

TEST(ModelConfig, SaysWhenTheFileIsMissing) {
  const auto config = read_model_config("/nonexistent/model.json");
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(exit_code_of(config.status()), ExitCode::kNoInput);
  const auto path = std::filesystem::path(::testing::TempDir()) / "model.json";
  std::ofstream(path) << kGpt;
  EXPECT_TRUE(read_model_config(path).ok());
}

TEST(ModelConfig, ConfigMakesAModelOfItsVocabulary) {
  for (const char* text : {kGpt, kLlama}) {
    const auto model = make_language_model(*parse_model_config(text));
    ASSERT_TRUE(model.ok());
    EXPECT_EQ((*model)->vocab_size(), 61);
  }
}

TEST(ModelConfig, BoundsSizesBeforeAnythingIsBuilt) {
  const auto gpt = [](const std::string& key, const std::string& value) {
    const std::string first = "{\"" + key + "\": " + value + ", ";
    std::string rest = R"("heads": 2, "vocab_size": 256, "seq_len": 64, "layers": 2, "width": 64, "model": "gpt"})";
    const auto at = rest.find("\"" + key + "\": ");
    if (at != std::string::npos) rest.erase(at, rest.find_first_of(",}", at) + 2 - at);
    return first + rest;
  };
  for (const char* key : {"vocab_size", "seq_len", "layers", "width", "heads", "mlp_ratio"}) {
    for (const char* value : {"1000000000", "9223372036854775807", "0", "-1", "1.5", "\"8\""})
      EXPECT_THAT(errors_of(gpt(key, value)), HasSubstr(std::string("/") + key + ": must be an integer from 1 to "));
  }
  // Each size is allowed, but all of them together are not. Their product does not even fit into 64 bits.
  EXPECT_THAT(errors_of(R"({"model": "gpt", "vocab_size": 134217728, "seq_len": 1048576, "layers": 10000,
    "width": 1048576, "heads": 2, "mlp_ratio": 1024})"),
              HasSubstr("parameters; want 1e+14 at most"));
}

TEST(ModelConfig, ErrorsPointAtThePageOfModels) { EXPECT_THAT(errors_of("{}"), HasSubstr("hint: docs/models.md")); }

TEST(ModelConfig, WrittenConfigReadsBackTheSame) {
  for (const char* text : {kGpt, kLlama}) {
    const std::string written = to_json(*parse_model_config(text));
    const auto again = parse_model_config(written);
    ASSERT_TRUE(again.ok()) << message_of(again.status());
    EXPECT_EQ(to_json(*again), written);
    EXPECT_EQ(parameter_count(*again), parameter_count(*parse_model_config(text)));
  }
}

TEST(ModelConfig, FolderWithoutAConfigNamesTheMissingFile) {
  // A folder counts as one of Hugging Face, so its config.json is read.
  const auto folder = read_model_config(::testing::TempDir());
  EXPECT_EQ(exit_code_of(folder.status()), ExitCode::kNoInput);
  EXPECT_THAT(message_of(folder.status()), HasSubstr("config.json"));
}

TEST(ModelDocs, CommittedPageIsUpToDate) {
  std::ifstream stream(std::string(TESSERA_DOCS) + "/models.md", std::ios::binary);
  const std::string committed{std::istreambuf_iterator<char>(stream), {}};
  EXPECT_TRUE(committed == model_reference())
      << "docs/models.md is not what the fields of model files say. Build tessera_model_docs and run, from the root of "
         "the tree: <build>/models/tessera_model_docs docs";
}

TEST(ModelDocs, ExamplesAndErrorsOfThePageAreTrue) {
  for (const std::string& text : {gpt_example(), llama_example()})
    EXPECT_TRUE(parse_model_config(text).ok()) << message_of(parse_model_config(text).status());
  const auto wrong = parse_model_config(
      R"({"model": "gpt", "vocab_size": 256, "seq_len": 0, "layer": 6, "layers": 6, "width": 8, "heads": 1})",
      "model.json");
  const std::string message = message_of(wrong.status());
  EXPECT_THAT(model_reference(), HasSubstr("```\n" + message + "\n```"));
}

}  // namespace
}  // namespace tessera::models
