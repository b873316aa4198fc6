#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "workshop/models/language_model.h"

namespace tessera::models {

/// The way in which the next token is drawn.
struct GenerateOptions {
  std::int64_t new_tokens = 0;
  double temperature = 1.0;  ///< logits are divided by it; 0: always the likeliest token ("greedy")
  std::int64_t top_k = 0;    ///< draw among the k likeliest only; 0: among all
  std::uint64_t seed = 0;    ///< the same seed, options and weights give the same tokens, on every rank
};

/// Continues each row of tokens, [B, T] int64 with T > 0, by new_tokens tokens. Returns [B, T + new_tokens], on the
/// device of `tokens`. The model sees only the last seq_len() tokens. The model runs in evaluation mode without
/// gradients, and the model's own mode is restored afterwards. Tokens are drawn on the CPU in fp32, so that the device
/// does not change the result. Throws c10::ValueError if a score is infinite or NaN.
at::Tensor generate(LanguageModel& model, const at::Tensor& tokens, const GenerateOptions& options);

}  // namespace tessera::models
