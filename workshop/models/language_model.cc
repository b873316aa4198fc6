#include "workshop/models/language_model.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <c10/util/Exception.h>

#include "runtime/base/status.h"
#include "workshop/models/gpt.h"
#include "workshop/models/llama.h"

namespace tessera::models {
namespace {

bool wants_recompute(const ModelConfig& config) {
  return std::visit([](const auto& c) { return c.recompute; }, config);
}

std::shared_ptr<LanguageModel> make(const GPTConfig& config) { return std::make_shared<GPTImpl>(config); }
std::shared_ptr<LanguageModel> make(const LlamaConfig& config) { return std::make_shared<LlamaImpl>(config); }

}  // namespace

at::Tensor LanguageModel::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  TORCH_CHECK(targets.sizes() == tokens.sizes(), "targets want the tokens' shape ", tokens.sizes(), ", got ",
              targets.sizes(), ". [T0360] hint: give each token a target: the token after it");
  const at::Tensor scores = logits(tokens).to(at::kFloat);
  return at::cross_entropy_loss(scores.view({-1, vocab_size()}), targets.reshape({-1}));
}

at::Tensor LanguageModel::run_block(bool recompute, const std::function<at::Tensor(const at::Tensor&)>& block,
                                    const at::Tensor& input) const {
  if (!recompute) return block(input);
  TORCH_CHECK(checkpoint_, name(),
              ": the model's config says \"recompute\": true, but set_checkpoint was not called. [T0361] hint: call it "
              "with tessera::checkpoint, or leave \"recompute\" out");
  return checkpoint_(block, input);
}

void LanguageModel::check_tokens(const at::Tensor& tokens) const {
  TORCH_CHECK(tokens.dim() == 2 && tokens.scalar_type() == at::kLong, name(), ": tokens want [batch, time] int64, got ",
              tokens.sizes(), " ", tokens.scalar_type(),
              ". [T0362] hint: .unsqueeze(0) makes a batch of one, .to(at::kLong) the type");
  TORCH_CHECK(tokens.size(1) > 0 && tokens.size(1) <= seq_len(), name(), ": tokens want 1 to ", seq_len(),
              " positions, got ", tokens.size(1), ". [T0363] hint: cut them, or raise \"seq_len\" of the model file");
}

absl::StatusOr<std::shared_ptr<LanguageModel>> make_language_model(const ModelConfig& config, CheckpointFn checkpoint) {
  if (wants_recompute(config) && !checkpoint) {
    return make_error(ExitCode::kConfig,
                      "model: \"recompute\": true needs activation checkpointing, which this "
                      "program does not offer. [T0364] hint: remove the key");
  }
  std::shared_ptr<LanguageModel> model = std::visit([](const auto& c) { return make(c); }, config);
  model->set_checkpoint(std::move(checkpoint));
  return model;
}

}  // namespace tessera::models
