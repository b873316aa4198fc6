// Tests the hook by which models recompute blocks in backward.

#include <ATen/ops/ones.h>

#include "runtime/base/status.h"
#include "tests/models/model_tests.h"
#include "workshop/models/gpt.h"
#include "workshop/models/llama.h"

namespace tessera::models {
namespace {

std::vector<ModelConfig> recomputing_models() {
  GPTConfig gpt = small_gpt();
  LlamaConfig llama = small_llama();
  gpt.recompute = llama.recompute = true;
  return {gpt, llama};
}

TEST(Recompute, ModelWithRecomputationNeedsAHook) {
  for (const ModelConfig& config : recomputing_models()) {
    const auto model = make_language_model(config);
    ASSERT_FALSE(model.ok());
    EXPECT_EQ(exit_code_of(model.status()), ExitCode::kConfig);
  }
  GPTConfig config = small_gpt();
  config.recompute = true;
  GPT direct(config);
  EXPECT_THROW(direct->forward(random_tokens(1, 4)), c10::Error);
}

TEST(Recompute, SendsEveryBlockThroughTheHook) {
  for (const ModelConfig& config : recomputing_models()) {
    int calls = 0;
    std::vector<std::function<at::Tensor(const at::Tensor&)>> segments;
    const CheckpointFn hook = [&](const auto& segment, const at::Tensor& input) {
      ++calls;
      segments.push_back(segment);
      return segment(input);
    };
    const auto model = make_language_model(config, hook);
    ASSERT_TRUE(model.ok());
    const at::Tensor tokens = random_tokens(2, 8);
    const at::Tensor through_hook = (*model)->forward(tokens);
    EXPECT_EQ(calls, 2);
    for (const auto& segment : segments) {  // in backward, segments run after forward has returned
      EXPECT_EQ(segment(at::ones({2, 8, 32})).sizes(), (std::vector<std::int64_t>{2, 8, 32}));
    }
    (*model)->set_checkpoint([](const auto& segment, const at::Tensor& input) { return segment(input); });
    EXPECT_TRUE((*model)->forward(tokens).equal(through_hook));
  }
}

}  // namespace
}  // namespace tessera::models
