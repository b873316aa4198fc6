#pragma once

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

namespace tessera::models {

/// Returns a linear layer with weights from N(0, std^2) and a zero bias.
torch::nn::Linear normal_linear(std::int64_t in, std::int64_t out, bool bias, double std);

/// Returns an embedding with weights from N(0, std^2).
torch::nn::Embedding normal_embedding(std::int64_t rows, std::int64_t width, double std);

}  // namespace tessera::models
