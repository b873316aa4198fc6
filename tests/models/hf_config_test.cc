// Tests the conversion of model configs and names of weights from and to Hugging Face's.

#include "workshop/models/hf_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/base/status.h"
#include "workshop/models/hf_names.h"

namespace tessera::models {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Returns the config in a file with these members. If the file is refused, the test fails with that error.
LlamaConfig llama(const std::string& members) {
  const auto read = parse_hf_config("{" + members + "}");
  EXPECT_TRUE(read.ok()) << message_of(read.status());
  return read.ok() ? std::get<LlamaConfig>(read->config) : LlamaConfig{};
}
std::string refusal(const std::string& members) {
  const auto read = parse_hf_config("{" + members + "}");
  if (read.ok()) return "";
  EXPECT_EQ(exit_code_of(read.status()), ExitCode::kConfig);
  return message_of(read.status());
}

TEST(HfConfig, MissingNumbersGetTransformersDefaults) {
  EXPECT_EQ(llama(R"("model_type":"llama")").key_value_heads(), 32);
  EXPECT_EQ(llama(R"("model_type":"mistral")").sliding_window, 4096);
  EXPECT_EQ(llama(R"("model_type":"mistral","sliding_window":null)").sliding_window, 0);
  EXPECT_EQ(llama(R"("model_type":"mistral")").key_value_heads(), 8);
  EXPECT_EQ(llama(R"("model_type":"qwen3")").head_size(), 128);
  EXPECT_EQ(llama(R"("model_type":"qwen2","sliding_window":5)").sliding_window, 0);
  const auto gpt = parse_hf_config(R"({"model_type":"gpt2"})");
  ASSERT_TRUE(gpt.ok());
  EXPECT_EQ(parameter_count(gpt->config), 124439808);  // the published number for GPT-2
}

TEST(HfConfig, RopeIsReadFromOldAndNewFiles) {
  const std::string scaled =
      R"("factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192)";
  for (const std::string& members : {R"("rope_theta":5e5,"rope_scaling":{"rope_type":"llama3",)" + scaled + "}",
                                     R"("rope_theta":5e5,"rope_scaling":{"type":"llama3",)" + scaled + "}",
                                     R"("rope_parameters":{"rope_theta":5e5,"rope_type":"llama3",)" + scaled + "}"}) {
    const LlamaConfig config = llama(R"("model_type":"llama",)" + members);
    EXPECT_EQ(config.rope.type, "llama3");
    EXPECT_EQ(config.rope.theta, 5e5);
    EXPECT_EQ(config.rope.factor, 8.0);
    EXPECT_EQ(config.rope.original_positions, 8192);
  }
  EXPECT_EQ(llama(R"("model_type":"llama","rope_scaling":null)").rope.type, "default");
  EXPECT_THAT(refusal(R"("model_type":"llama","rope_scaling":{"rope_type":"yarn","factor":2.0})"), HasSubstr("yarn"));
  EXPECT_THAT(refusal(R"("model_type":"llama","rope_scaling":{"rope_type":"linear"})"),
              HasSubstr("/rope_scaling/factor"));
  EXPECT_THAT(refusal(R"("model_type":"llama","rope_scaling":{"rope_type":"llama3","factor":2.0})"),
              HasSubstr("low_freq_factor"));
  EXPECT_THAT(refusal(R"("model_type":"llama","rope_scaling":{"rope_type":"linear","factor":2.0,"beta":1})"),
              HasSubstr("/rope_scaling/beta"));
  EXPECT_THAT(refusal(R"("model_type":"llama","rope_scaling":[2])"), HasSubstr("must be an object"));
}

TEST(HfConfig, UnsupportedArchitecturesAndKeysAreRefused) {
  EXPECT_THAT(refusal(R"("vocab_size":5)"), HasSubstr("/model_type"));
  EXPECT_THAT(refusal(R"("model_type":"bert")"), HasSubstr("bert"));
  const auto with = [](const std::string& type, const std::string& members) {
    return refusal("\"model_type\":\"" + type + "\"," + members);
  };
  EXPECT_THAT(with("gpt2", R"("activation_function":"relu")"), HasSubstr("/activation_function"));
  EXPECT_THAT(with("gpt2", R"("attn_pdrop":0.2)"), HasSubstr("one dropout"));
  EXPECT_THAT(with("gpt2", R"("n_inner":1000)"), HasSubstr("multiple of n_embd"));
  EXPECT_THAT(with("gpt2", R"("n_embd":0)"), HasSubstr("/n_embd"));
  EXPECT_THAT(with("gpt2", R"("n_layer":1e300)"), HasSubstr("/n_layer"));
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"})
    EXPECT_THAT(with("gpt2", std::string("\"") + key + "\":true"), HasSubstr(key));
  EXPECT_THAT(with("gpt2", R"("scale_attn_weights":false)"), HasSubstr("scale_attn_weights"));
  EXPECT_THAT(with("llama", R"("hidden_act":"gelu")"), HasSubstr("/hidden_act"));
  EXPECT_THAT(with("llama", R"("attention_dropout":0.1)"), HasSubstr("/attention_dropout"));
  EXPECT_THAT(with("llama", R"("num_key_value_heads":5)"), HasSubstr("num_key_value_heads"));
  EXPECT_THAT(with("llama", R"("vocab_size":"61")"), HasSubstr("/vocab_size"));
  EXPECT_THAT(with("qwen2", R"("num_hidden_layers":2,"layer_types":["full_attention","sliding_attention"])"),
              HasSubstr("layer 1"));
  EXPECT_THAT(with("qwen2", R"("num_hidden_layers":2,"use_sliding_window":true,"max_window_layers":1,)"
                            R"("layer_types":["sliding_attention","full_attention"])"),
              HasSubstr("layer 0"));
  EXPECT_THAT(with("llama", R"("vocab_size":5,"vocab_size":6)"), HasSubstr("given twice"));
  EXPECT_NE(refusal("\"model_type\":"), "");
  EXPECT_FALSE(parse_hf_config("[]").ok());
  EXPECT_FALSE(parse_hf_config(std::string(100'000, '[')).ok());
}

TEST(HfConfig, UnknownKeysAreListed) {
  const auto read = parse_hf_config(R"({"model_type":"llama","use_cache":true,"my_trick":3,"torch_dtype":"bfloat16"})");
  ASSERT_TRUE(read.ok());
  EXPECT_THAT(read->unknown, ElementsAre("my_trick"));
}

TEST(HfConfig, ModelsUnknownToHuggingFaceAreNotWritten) {
  LlamaConfig config{
      .vocab_size = 8, .hidden_size = 8, .intermediate_size = 8, .num_hidden_layers = 1, .num_attention_heads = 2};
  EXPECT_THAT(*to_hf_config(config, "float32"), HasSubstr("\"llama\""));
  config.qk_norm = config.mlp_bias = true;
  EXPECT_EQ(exit_code_of(to_hf_config(config, "float32").status()), ExitCode::kConfig);
  config.qk_norm = false;
  config.sliding_window = 3;
  EXPECT_FALSE(to_hf_config(config, "float32").ok());
  config.mlp_bias = false;
  EXPECT_THAT(*to_hf_config(config, "float32"), HasSubstr("\"mistral\""));
  EXPECT_FALSE(
      to_hf_config(GPTConfig{.vocab_size = 8, .seq_len = 8, .layers = 1, .width = 8, .heads = 1, .bias = false},
                   "float32")
          .ok());
}

TEST(HfNames, Gpt2MatricesAreTransposedInTheFile) {
  const TensorNames names = hf_names(GPTConfig{});
  const NameInFile up = names("blocks.11.mlp.up.weight");
  EXPECT_THAT(up.names, ElementsAre("transformer.h.11.mlp.c_fc.weight", "h.11.mlp.c_fc.weight"));
  EXPECT_TRUE(up.transposed);
  EXPECT_FALSE(names("blocks.1.mlp.up.bias").transposed);
  EXPECT_FALSE(names("token_embedding.weight").transposed);
  EXPECT_THAT(names("head.weight").names, ElementsAre("lm_head.weight"));
}

TEST(HfNames, TiedHeadIsListedAsACopyOfTheEmbedding) {
  for (const bool tied : {false, true}) {
    const std::vector<std::string> copies =
        tied ? std::vector<std::string>{"lm_head.weight"} : std::vector<std::string>{};
    const ModelConfig gpt = GPTConfig{.tie_head = tied}, llama = LlamaConfig{.tie_word_embeddings = tied};
    EXPECT_EQ(hf_names(gpt)("token_embedding.weight").copies, copies);
    EXPECT_EQ(hf_names(llama)("model.embed_tokens.weight").copies, copies);
    for (const ModelConfig& config : {gpt, llama}) {
      EXPECT_THAT(hf_names(config)("norm.weight").copies, ElementsAre());
      EXPECT_THAT(hf_ignored(config), ::testing::Not(::testing::Contains(HasSubstr("lm_head"))));
    }
  }
}

}  // namespace
}  // namespace tessera::models
