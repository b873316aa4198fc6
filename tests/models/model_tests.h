#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/randint.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "workshop/models/language_model.h"
#include "workshop/models/model_config.h"

namespace tessera::models {

inline GPTConfig small_gpt() { return {.vocab_size = 61, .seq_len = 16, .layers = 2, .width = 32, .heads = 4}; }

inline LlamaConfig small_llama() {
  return {.vocab_size = 61,
          .hidden_size = 32,
          .intermediate_size = 48,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .max_position_embeddings = 16};
}

/// Returns random tokens of the small models' vocabulary.
inline at::Tensor random_tokens(std::int64_t batch, std::int64_t time, std::uint64_t seed = 1) {
  return at::randint(0, 61, {batch, time}, at::detail::createCPUGenerator(seed), at::kLong);
}

inline std::int64_t count_parameters(const torch::nn::Module& module) {
  std::int64_t total = 0;
  for (const at::Tensor& parameter : module.parameters()) total += parameter.numel();
  return total;
}

/// Checks properties of any causal language model with the small models' sizes.
inline void expect_shapes_and_gradients(LanguageModel& model) {
  const at::Tensor tokens = random_tokens(3, 11), targets = random_tokens(3, 11, 2);
  const at::Tensor logits = model.forward(tokens);
  EXPECT_EQ(logits.sizes(), (std::vector<std::int64_t>{3, 11, 61}));
  const at::Tensor loss = model.forward(tokens, targets);
  EXPECT_EQ(loss.dim(), 0);
  EXPECT_NEAR(loss.item<float>(), std::log(61.0f), 0.2f);  // an untrained model finds 61 tokens about equally likely
  loss.backward();
  for (const auto& item : model.named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_GT(item.value().grad().abs().max().item<float>(), 0.0f) << item.key();
  }
}

inline void expect_causal(LanguageModel& model) {
  const at::Tensor tokens = random_tokens(2, 12);
  const at::Tensor before = model.forward(tokens);
  for (std::int64_t t : {0, 5, 11}) {
    at::Tensor changed = tokens.clone();
    changed.select(1, t).add_(1).remainder_(61);
    const at::Tensor after = model.forward(changed);
    EXPECT_TRUE(after.narrow(1, 0, t).equal(before.narrow(1, 0, t))) << "an earlier position saw token " << t;
    EXPECT_FALSE(after.select(1, t).equal(before.select(1, t))) << "position " << t << " did not see its token";
    EXPECT_FALSE(after.select(1, 11).equal(before.select(1, 11))) << "the last position did not see token " << t;
  }
}

}  // namespace tessera::models
