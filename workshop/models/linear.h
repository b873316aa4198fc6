#pragma once

#include <ATen/ops/linear.h>
#include <torch/nn/modules/linear.h>

namespace tessera::models {

/// Applies the layer to `x`, [..., in] to [..., out]. at::linear adds the bias where it makes the product; LibTorch's
/// own torch::nn::Linear::forward adds it in a second pass for inputs of three dimensions, which takes a GPU a tenth of
/// a step.
inline at::Tensor linear(const torch::nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

}  // namespace tessera::models
