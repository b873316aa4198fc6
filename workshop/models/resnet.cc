#include "workshop/models/resnet.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/relu.h>
#include <torch/nn/init.h>

namespace tessera::models {
namespace {

torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
  torch::nn::init::kaiming_normal_(conv->weight, 0.0, torch::kFanOut, torch::kReLU);
  return conv;
}

}  // namespace

BasicBlockImpl::BasicBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride)
    : conv1_(convolution(in, out, 3, stride)), conv2_(convolution(out, out, 3, 1)), norm1_(out), norm2_(out) {
  register_module("conv1", conv1_);
  register_module("norm1", norm1_);
  register_module("conv2", conv2_);
  register_module("norm2", norm2_);
  if (in == out && stride == 1) return;
  shortcut_ =
      register_module("shortcut", torch::nn::Sequential(convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out)));
}

at::Tensor BasicBlockImpl::forward(const at::Tensor& x) {
  const at::Tensor inner = at::relu(norm1_->forward(conv1_->forward(x)));
  const at::Tensor outer = norm2_->forward(conv2_->forward(inner));
  return at::relu(outer + (shortcut_.is_empty() ? x : shortcut_->forward(x)));
}

ResNetImpl::ResNetImpl(const ResNetConfig& config)
    : stem_(convolution(config.channels, config.width, 3, 1)),
      norm_(config.width),
      head_(config.width << (config.blocks.size() - 1), config.classes) {
  register_module("stem", stem_);
  register_module("norm", norm_);
  register_module("stages", stages_);
  std::int64_t in = config.width;
  for (std::size_t stage = 0; stage < config.blocks.size(); ++stage) {
    const std::int64_t out = config.width << stage;
    for (std::int64_t i = 0; i < config.blocks[stage]; ++i, in = out) {
      stages_->push_back(BasicBlock(in, out, i == 0 && stage > 0 ? 2 : 1));
    }
  }
  register_module("head", head_);
}

at::Tensor ResNetImpl::forward(const at::Tensor& images) {
  const at::Tensor x = stages_->forward(at::relu(norm_->forward(stem_->forward(images))));
  return head_->forward(x.mean({2, 3}));
}

at::Tensor ResNetImpl::forward(const at::Tensor& images, const at::Tensor& labels) {
  return at::cross_entropy_loss(forward(images).to(at::kFloat), labels);
}

}  // namespace tessera::models
