#pragma once

#include <ATen/ops/linear.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

namespace tessera::models {

/// Returns a linear layer with weights from N(0, std^2) and a zero bias.
torch::nn::Linear normal_linear(std::int64_t in, std::int64_t out, bool bias, double std);

/// Returns an embedding with weights from N(0, std^2).
torch::nn::Embedding normal_embedding(std::int64_t rows, std::int64_t width, double std);

/// Applies the layer to `x`, [..., in] to [..., out]. at::linear adds the bias in the pass that computes the product.
/// LibTorch's own torch::nn::Linear::forward adds the bias in a second pass for inputs of three dimensions. This second
/// pass takes a GPU a tenth of a step.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

}  // namespace tessera::models
