#include "workshop/models/resnet.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>
#include <torch/nn/init.h>

namespace tessera::models {
namespace {

torch::nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
  torch::nn::init::kaiming_normal_(conv->weight, 0.0, torch::kFanOut, torch::kReLU);
  return conv;
}

/// Returns the shortcut of a block. It is empty if the shape does not change, and otherwise a 1x1 convolution.
torch::nn::Sequential shortcut(std::int64_t in, std::int64_t out, std::int64_t stride) {
  if (in == out && stride == 1) return nullptr;
  return torch::nn::Sequential(convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out));
}

}  // namespace

ResNetConfig resnet18(std::int64_t side, std::int64_t channels, std::int64_t classes) {
  return {.classes = classes, .channels = channels, .wide_stem = side >= 64};
}

ResNetConfig resnet50(std::int64_t side, std::int64_t channels, std::int64_t classes) {
  ResNetConfig config = resnet18(side, channels, classes);
  config.blocks = {3, 4, 6, 3};
  config.bottlenecks = true;
  return config;
}

BasicBlockImpl::BasicBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride)
    : conv1_(convolution(in, out, 3, stride)), conv2_(convolution(out, out, 3, 1)), norm1_(out), norm2_(out) {
  register_module("conv1", conv1_);
  register_module("norm1", norm1_);
  register_module("conv2", conv2_);
  register_module("norm2", norm2_);
  shortcut_ = shortcut(in, out, stride);
  if (!shortcut_.is_empty()) register_module("shortcut", shortcut_);
}

at::Tensor BasicBlockImpl::forward(const at::Tensor& x) {
  const at::Tensor inner = at::relu(norm1_->forward(conv1_->forward(x)));
  const at::Tensor outer = norm2_->forward(conv2_->forward(inner));
  return at::relu(outer + (shortcut_.is_empty() ? x : shortcut_->forward(x)));
}

BottleneckImpl::BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride)
    : conv1_(convolution(in, width, 1, 1)),
      conv2_(convolution(width, width, 3, stride)),
      conv3_(convolution(width, 4 * width, 1, 1)),
      norm1_(width),
      norm2_(width),
      norm3_(4 * width) {
  register_module("conv1", conv1_);
  register_module("norm1", norm1_);
  register_module("conv2", conv2_);
  register_module("norm2", norm2_);
  register_module("conv3", conv3_);
  register_module("norm3", norm3_);
  shortcut_ = shortcut(in, 4 * width, stride);
  if (!shortcut_.is_empty()) register_module("shortcut", shortcut_);
}

at::Tensor BottleneckImpl::forward(const at::Tensor& x) {
  const at::Tensor narrow = at::relu(norm1_->forward(conv1_->forward(x)));
  const at::Tensor inner = at::relu(norm2_->forward(conv2_->forward(narrow)));
  const at::Tensor outer = norm3_->forward(conv3_->forward(inner));
  return at::relu(outer + (shortcut_.is_empty() ? x : shortcut_->forward(x)));
}

ResNetImpl::ResNetImpl(const ResNetConfig& config)
    : wide_stem_(config.wide_stem),
      stem_(convolution(config.channels, config.width, wide_stem_ ? 7 : 3, wide_stem_ ? 2 : 1)),
      norm_(config.width),
      head_((config.bottlenecks ? 4 : 1) * config.width << (config.blocks.size() - 1), config.classes) {
  register_module("stem", stem_);
  register_module("norm", norm_);
  register_module("stages", stages_);
  std::int64_t in = config.width;
  for (std::size_t stage = 0; stage < config.blocks.size(); ++stage) {
    const std::int64_t width = config.width << stage, out = config.bottlenecks ? 4 * width : width;
    for (std::int64_t i = 0; i < config.blocks[stage]; ++i, in = out) {
      const std::int64_t stride = i == 0 && stage > 0 ? 2 : 1;
      if (config.bottlenecks)
        stages_->push_back(Bottleneck(in, width, stride));
      else
        stages_->push_back(BasicBlock(in, out, stride));
    }
  }
  register_module("head", head_);
}

at::Tensor ResNetImpl::forward(const at::Tensor& images) {
  at::Tensor x = at::relu(norm_->forward(stem_->forward(images)));
  if (wide_stem_) x = at::max_pool2d(x, /*kernel_size=*/3, /*stride=*/2, /*padding=*/1);
  return head_->forward(stages_->forward(x).mean({2, 3}));
}

at::Tensor ResNetImpl::forward(const at::Tensor& images, const at::Tensor& labels) {
  return at::cross_entropy_loss(forward(images).to(at::kFloat), labels);
}

}  // namespace tessera::models
