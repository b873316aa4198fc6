// Tests the Llama model, its rotary embeddings and its norm.

#include "workshop/models/llama.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>

#include "tests/models/model_tests.h"

namespace tessera::models {
namespace {

TEST(Llama, HasTheRightShapesAndAllParametersLearn) {
  at::manual_seed(1);
  Llama model(small_llama());
  expect_shapes_and_gradients(*model);
  LlamaConfig tied = small_llama();
  tied.tie_word_embeddings = true;
  Llama smaller(tied);
  expect_shapes_and_gradients(*smaller);
}

TEST(Llama, IsCausal) {
  at::manual_seed(2);
  Llama model(small_llama());
  expect_causal(*model);
}

TEST(Llama, FormulaCountsItsParameters) {
  for (bool flag : {true, false}) {
    LlamaConfig config = small_llama();
    config.attention_bias = config.tie_word_embeddings = flag;
    config.mlp_bias = !flag;
    config.head_dim = flag ? 6 : 0;
    EXPECT_EQ(count_parameters(*Llama(config)), parameter_count(config));
  }
  const LlamaConfig llama_7b{.vocab_size = 32000,
                             .hidden_size = 4096,
                             .intermediate_size = 11008,
                             .num_hidden_layers = 32,
                             .num_attention_heads = 32};
  EXPECT_EQ(parameter_count(llama_7b), 6738415616);  // the published number for Llama 2 7B
}

// Grouped-query attention equals multi-head attention in which shared key and value heads are repeated.
TEST(Llama, GroupedQueriesEqualRepeatedHeads) {
  at::manual_seed(3);
  LlamaConfig grouped_config = small_llama(), full_config = small_llama();
  full_config.num_key_value_heads = 4;
  Llama grouped(grouped_config), full(full_config);
  const at::NoGradGuard no_grad;
  auto wanted = full->named_parameters();
  for (const auto& item : grouped->named_parameters()) {
    at::Tensor value = item.value();
    const bool shared = item.key().ends_with("k_proj.weight") || item.key().ends_with("v_proj.weight");
    if (shared) value = value.view({2, 8, 32}).repeat_interleave(2, 0).reshape({32, 32});
    wanted[item.key()].copy_(value);
  }
  const at::Tensor tokens = random_tokens(2, 10);
  EXPECT_TRUE(at::allclose(grouped->forward(tokens), full->forward(tokens), 1e-5, 1e-6));
}

// Rotary embeddings exist for this property: scores depend on the distance between two positions, and not on the
// positions themselves.
TEST(Rotary, ScoresDependOnDistanceOnly) {
  at::manual_seed(4);
  const LlamaConfig config = small_llama();
  const Rotary rotary = Rotary::make(16, config, at::TensorOptions(at::kFloat));
  const at::Tensor q = at::randn({8}).expand({1, 1, 16, 8}), k = at::randn({8}).expand({1, 1, 16, 8});
  const at::Tensor scores = rotary.rotate(q).matmul(rotary.rotate(k).transpose(-1, -2)).view({16, 16});
  for (std::int64_t distance : {0, 1, 7}) {
    const at::Tensor diagonal = scores.diagonal(distance);
    EXPECT_TRUE(at::allclose(diagonal, diagonal.select(0, 0).expand_as(diagonal), 1e-4, 1e-5)) << distance;
  }
  EXPECT_GT((scores.diagonal(0).mean() - scores.diagonal(7).mean()).abs().item<float>(), 1e-3f);
}

TEST(RMSNorm, HasUnitMeanSquare) {
  at::manual_seed(5);
  RMSNorm norm(64, 1e-6);
  const at::Tensor y = norm->forward(at::randn({10, 64}) * 7.0 + 3.0);
  EXPECT_TRUE(at::allclose(y.square().mean(-1), at::ones({10}), 1e-4, 1e-4));
}

}  // namespace
}  // namespace tessera::models
