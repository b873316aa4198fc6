// Tests the generation of tokens from a model.

#include "workshop/models/generate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "tests/models/model_tests.h"
#include "workshop/models/gpt.h"

namespace tessera::models {
namespace {

GPT make_model() {
  at::manual_seed(1);
  GPTConfig config = small_gpt();
  config.dropout = 0.5;  // dropout must not matter here
  return GPT(config);
}

TEST(Generate, GreedyTakesTheLikeliestTokenOfACroppedContext) {
  GPT model = make_model();
  const at::Tensor start = random_tokens(3, 10);
  const at::Tensor got = generate(*model, start, {.new_tokens = 12, .temperature = 0.0});  // more than 16 positions
  EXPECT_TRUE(model->is_training()) << "the mode must be restored";
  const at::NoGradGuard no_grad;
  model->eval();
  at::Tensor wanted = start;
  for (int i = 0; i < 12; ++i) {
    const at::Tensor context = wanted.slice(1, std::max<std::int64_t>(0, wanted.size(1) - 16));
    wanted = at::cat({wanted, model->forward(context).select(1, -1).argmax(-1, true)}, 1);
  }
  EXPECT_TRUE(got.equal(wanted));
}

TEST(Generate, SameSeedGivesTheSameTokens) {
  GPT model = make_model();
  const at::Tensor start = random_tokens(2, 4);
  const auto run = [&](std::uint64_t seed) { return generate(*model, start, {.new_tokens = 20, .seed = seed}); };
  EXPECT_TRUE(run(5).equal(run(5)));
  EXPECT_FALSE(run(5).equal(run(6)));
  EXPECT_TRUE(run(5).narrow(1, 0, 4).equal(start));
}

// A model whose logits are known: token i has logit log(weights[i]), whatever tokens came before.
class FixedModel final : public LanguageModel {
 public:
  explicit FixedModel(at::Tensor logits) : logits_(std::move(logits)) {}
  at::Tensor logits(const at::Tensor& tokens) override {
    return logits_.expand({tokens.size(0), tokens.size(1), vocab_size()});
  }
  std::int64_t vocab_size() const override { return logits_.size(0); }
  std::int64_t seq_len() const override { return 4; }

 private:
  at::Tensor logits_;
};

std::vector<double> frequencies(LanguageModel& model, GenerateOptions options) {
  options.new_tokens = 1;
  const at::Tensor drawn = generate(model, at::zeros({20000, 1}, at::kLong), options).select(1, 1);
  std::vector<double> result;
  for (std::int64_t token = 0; token < model.vocab_size(); ++token) {
    result.push_back(static_cast<double>((drawn == token).sum().item<std::int64_t>()) / 20000.0);
  }
  return result;
}

TEST(Generate, DrawsByProbabilityTemperatureAndTopK) {
  FixedModel model(at::tensor({0.1, 0.5, 0.2, 0.2}).log());
  const auto expect = [&](const GenerateOptions& options, const std::vector<double>& wanted) {
    const std::vector<double> got = frequencies(model, options);
    for (std::size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 0.015) << "token " << i;
  };
  expect({}, {0.1, 0.5, 0.2, 0.2});
  expect({.temperature = 0.5}, {0.01 / 0.34, 0.25 / 0.34, 0.04 / 0.34, 0.04 / 0.34});  // weights squared / their sum
  expect({.top_k = 1}, {0.0, 1.0, 0.0, 0.0});
  expect({.top_k = 3}, {0.0, 0.5 / 0.9, 0.2 / 0.9, 0.2 / 0.9});
  expect({.top_k = 100}, {0.1, 0.5, 0.2, 0.2});
  expect({.temperature = 0.0}, {0.0, 1.0, 0.0, 0.0});
}

TEST(Generate, EmptyStartAndNegativeTemperatureAreRefused) {
  GPT model = make_model();
  EXPECT_THROW(generate(*model, random_tokens(2, 0), {.new_tokens = 1}), c10::Error);
  EXPECT_THROW(generate(*model, random_tokens(2, 3), {.new_tokens = 1, .temperature = -1.0}), c10::Error);
}

}  // namespace
}  // namespace tessera::models
