#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

namespace tessera::models {

/// The shape of a ResNet.
struct ResNetConfig {
  std::int64_t classes = 10;
  std::int64_t channels = 3;  ///< channels of the images
  /// Blocks of each stage; every stage after the first halves the image.
  std::vector<std::int64_t> blocks = {2, 2, 2, 2};
  std::int64_t width = 64;  ///< channels of the first stage; each further stage doubles it
};

/// Two 3x3 convolutions with batch norm, and a shortcut around them: the identity, or a 1x1 convolution where the shape
/// changes (He et al., arXiv 1512.03385, figure 5 left, option B).
class BasicBlockImpl : public torch::nn::Module {
 public:
  BasicBlockImpl(std::int64_t in, std::int64_t out, std::int64_t stride);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::Conv2d conv1_, conv2_;
  torch::nn::BatchNorm2d norm1_, norm2_;
  torch::nn::Sequential shortcut_{nullptr};
};
TORCH_MODULE(BasicBlock);

/// ResNet for small images such as CIFAR's 32 x 32: a 3x3 stem without pooling, stages of basic blocks, the mean over
/// the image, a linear head. The default config is ResNet-18, of 11 173 962 parameters.
class ResNetImpl : public torch::nn::Module {
 public:
  explicit ResNetImpl(const ResNetConfig& config = {});
  /// images: [B, channels, H, W]. Returns [B, classes].
  at::Tensor forward(const at::Tensor& images);
  /// labels: [B] int64. Returns the mean cross entropy, in fp32.
  at::Tensor forward(const at::Tensor& images, const at::Tensor& labels);

 private:
  torch::nn::Conv2d stem_;
  torch::nn::BatchNorm2d norm_;
  torch::nn::Sequential stages_;
  torch::nn::Linear head_;
};
TORCH_MODULE(ResNet);

}  // namespace tessera::models
