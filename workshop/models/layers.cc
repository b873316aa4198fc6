#include "workshop/models/layers.h"

#include <ATen/core/grad_mode.h>

namespace tessera::models {

torch::nn::Linear normal_linear(std::int64_t in, std::int64_t out, bool bias, double std) {
  torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(bias));
  const at::NoGradGuard no_grad;
  linear->weight.normal_(0.0, std);
  if (bias) linear->bias.zero_();
  return linear;
}

torch::nn::Embedding normal_embedding(std::int64_t rows, std::int64_t width, double std) {
  torch::nn::Embedding embedding(rows, width);
  const at::NoGradGuard no_grad;
  embedding->weight.normal_(0.0, std);
  return embedding;
}

}  // namespace tessera::models
