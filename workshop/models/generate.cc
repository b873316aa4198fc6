#include "workshop/models/generate.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>

#include <algorithm>

#include "runtime/base/seeded_fault.h"

namespace tessera::models {
namespace {

// Puts a module into evaluation mode, and restores its mode at the end of the scope, even after an exception.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) : module_(module), was_training_(module.is_training()) {
    module_.eval();
  }
  ~EvaluationMode() { module_.train(was_training_); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
  bool was_training_;
};

// Draws a token for each row. `scores` are [B, V] fp32 on the CPU. Returns [B, 1] int64.
at::Tensor draw(at::Tensor scores, const GenerateOptions& options, const at::Generator& generator) {
  TORCH_CHECK_VALUE(
      scores.isfinite().all().item<bool>(),
      "the model's scores of the next token are infinite or NaN, since its weights or what it computes are. [T0353] "
      "hint: take weights that are finite; training that ends so wants a smaller learning rate");
  if (options.temperature == 0.0) return scores.argmax(-1, /*keepdim=*/true);
  scores = scores / options.temperature;
  if (options.top_k > 0 && options.top_k < scores.size(-1)) {
    const std::int64_t kept = options.top_k + (seeded_fault(SeededFault::kTopKOneMore) ? 1 : 0);
    const auto [values, indices] = at::topk(scores, kept, -1);
    const at::Tensor probabilities = at::softmax(values, -1);
    return indices.gather(-1, at::multinomial(probabilities, 1, /*replacement=*/false, generator));
  }
  return at::multinomial(at::softmax(scores, -1), 1, /*replacement=*/false, generator);
}

}  // namespace

at::Tensor generate(LanguageModel& model, const at::Tensor& tokens, const GenerateOptions& options) {
  TORCH_CHECK(tokens.dim() == 2 && tokens.size(1) > 0, "generate: tokens want [batch, time] with time > 0, got ",
              tokens.sizes(), ". [T0354] hint: .unsqueeze(0) makes a batch of one");
  TORCH_CHECK(options.temperature >= 0.0 && options.top_k >= 0 && options.new_tokens >= 0,
              "generate: temperature, top_k and new_tokens cannot be negative. [T0355] hint: 0 is the least of each");
  const at::NoGradGuard no_grad;
  const EvaluationMode evaluation(model);
  const at::Generator generator = at::detail::createCPUGenerator(options.seed);
  at::Tensor all = tokens;
  for (std::int64_t i = 0; i < options.new_tokens; ++i) {
    const std::int64_t context = std::min(all.size(1), model.seq_len());
    const at::Tensor logits = model.logits(all.narrow(1, all.size(1) - context, context));
    const at::Tensor last = logits.select(1, context - 1).to(at::kCPU, at::kFloat);
    all = at::cat({all, draw(last, options, generator).to(all.device())}, 1);
  }
  return all;
}

}  // namespace tessera::models
