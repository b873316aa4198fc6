#pragma once

#include <ATen/ops/linear.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

namespace tessera::models {

/// Returns a linear layer with weights from N(0, std^2) and a zero bias.
torch::nn::Linear normal_linear(std::int64_t in, std::int64_t out, bool bias, double std);

/// Returns an embedding with weights from N(0, std^2).
torch::nn::Embedding normal_embedding(std::int64_t rows, std::int64_t width, double std);

/// Applies the layer to `x`, [..., in] to [..., out]. at::linear adds the bias where it makes the product; LibTorch's
/// own torch::nn::Linear::forward adds it in a second pass for inputs of three dimensions, which takes a GPU a tenth of
/// a step.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

}  // namespace tessera::models
