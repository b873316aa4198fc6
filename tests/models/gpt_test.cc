// Tests the GPT model.

#include "workshop/models/gpt.h"

#include "tests/models/model_tests.h"

namespace tessera::models {
namespace {

TEST(Gpt, HasTheRightShapesAndAllParametersLearn) {
  at::manual_seed(1);
  GPT model(small_gpt());
  expect_shapes_and_gradients(*model);
  GPTConfig bare = small_gpt();
  bare.bias = false;
  bare.tie_head = true;
  GPT tied(bare);
  expect_shapes_and_gradients(*tied);
}

TEST(Gpt, IsCausal) {
  at::manual_seed(2);
  GPT model(small_gpt());
  expect_causal(*model);
}

TEST(Gpt, ParameterCountEqualsTheFormula) {
  for (bool bias : {true, false}) {
    for (bool tie : {true, false}) {
      GPTConfig config = small_gpt();
      config.bias = bias;
      config.tie_head = tie;
      config.mlp_ratio = 3;
      EXPECT_EQ(count_parameters(*GPT(config)), parameter_count(config));
    }
  }
  // GPT-2 "small" has 12 blocks of width 768, a tied head, and 124 439 808 parameters.
  const GPTConfig gpt2{.vocab_size = 50257, .seq_len = 1024, .layers = 12, .width = 768, .heads = 12, .tie_head = true};
  EXPECT_EQ(parameter_count(gpt2), 124439808);
  const GPTConfig medium{.vocab_size = 8192, .seq_len = 128, .layers = 8, .width = 768, .heads = 12};
  EXPECT_NEAR(static_cast<double>(parameter_count(medium)), 69.4e6, 0.1e6);
}

TEST(Gpt, SameSeedSameModelSameLoss) {
  const auto loss = [](std::uint64_t seed) {
    at::manual_seed(seed);
    GPT model(small_gpt());
    return model->forward(random_tokens(2, 8), random_tokens(2, 8, 2));
  };
  EXPECT_TRUE(loss(3).equal(loss(3)));
  EXPECT_FALSE(loss(3).equal(loss(4)));
}

TEST(Gpt, InitialValuesAreThoseOfGpt2) {
  at::manual_seed(5);
  GPTConfig config{.vocab_size = 500, .seq_len = 100, .layers = 8, .width = 128, .heads = 4};
  for (const auto& item : GPT(config)->named_parameters()) {
    const std::string& name = item.key();
    const at::Tensor& value = item.value();
    const bool is_norm = name.find("norm") != std::string::npos;
    if (value.dim() == 1) {
      const float constant = is_norm && name.ends_with("weight") ? 1.0f : 0.0f;
      EXPECT_TRUE((value == constant).all().item<bool>()) << name;
      continue;
    }
    const bool residual = name.ends_with("projection.weight") || name.ends_with("down.weight");
    EXPECT_NEAR(value.std().item<double>(), residual ? 0.02 / 4.0 : 0.02, residual ? 2e-4 : 8e-4) << name;
    EXPECT_NEAR(value.mean().item<double>(), 0.0, 1e-3) << name;
  }
}

TEST(Gpt, TargetsOfMinus100DoNotCount) {
  at::manual_seed(6);
  GPT model(small_gpt());
  const at::Tensor tokens = random_tokens(2, 8);
  at::Tensor half = random_tokens(2, 8, 2);
  half.narrow(1, 4, 4).fill_(-100);
  const at::Tensor loss = model->forward(tokens, half);
  const at::Tensor first_half = model->forward(tokens.narrow(1, 0, 4), half.narrow(1, 0, 4));
  EXPECT_NEAR(loss.item<float>(), first_half.item<float>(), 1e-5f);
}

TEST(Gpt, DropoutActsInTrainingOnly) {
  at::manual_seed(7);
  GPTConfig config = small_gpt();
  config.dropout = 0.3;
  GPT model(config);
  const at::Tensor tokens = random_tokens(2, 8);
  EXPECT_FALSE(model->forward(tokens).equal(model->forward(tokens)));
  model->eval();
  EXPECT_TRUE(model->forward(tokens).equal(model->forward(tokens)));
}

TEST(Gpt, LossIsFp32InBf16) {
  at::manual_seed(8);
  GPT model(small_gpt());
  const at::Tensor tokens = random_tokens(2, 8), targets = random_tokens(2, 8, 2);
  const at::Tensor wanted = model->forward(tokens, targets);
  model->to(at::kBFloat16);
  EXPECT_EQ(model->forward(tokens).scalar_type(), at::kBFloat16);
  const at::Tensor loss = model->forward(tokens, targets);
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  EXPECT_NEAR(loss.item<float>(), wanted.item<float>(), 0.02f);
}

TEST(Gpt, RefusesWrongTokens) {
  GPT model(small_gpt());
  EXPECT_THROW(model->forward(random_tokens(2, 17)), c10::Error);
  EXPECT_THROW(model->forward(random_tokens(2, 8).to(at::kInt)), c10::Error);
  EXPECT_THROW(model->forward(random_tokens(2, 8).flatten()), c10::Error);
  EXPECT_THROW(model->forward(random_tokens(2, 8), random_tokens(2, 7)), c10::Error);
}

}  // namespace
}  // namespace tessera::models
