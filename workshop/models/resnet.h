#pragma once

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <vector>

namespace tessera::models {

/// The shape of a ResNet (He et al., arXiv 1512.03385).
struct ResNetConfig {
  std::int64_t classes = 10;
  std::int64_t channels = 3;  ///< channels of the images
  /// Number of blocks in each stage; every stage after the first halves the image.
  std::vector<std::int64_t> blocks = {2, 2, 2, 2};
  std::int64_t width = 64;  ///< channels of the first stage; each further stage doubles it
  /// whether blocks have three convolutions, with 4 times as many channels at their end (ResNet-50)
  bool bottlenecks = false;
  bool wide_stem = false;  ///< a 7x7 convolution and pooling, which both halve the image (for 224 x 224 pixels)
};

/// These functions return ResNet-18 and ResNet-50 of He et al. for images of `side` x `side` pixels. The stem is wide
/// if `side` is 64 or more.
ResNetConfig resnet18(std::int64_t side, std::int64_t channels, std::int64_t classes);
ResNetConfig resnet50(std::int64_t side, std::int64_t channels, std::int64_t classes);

/// Two 3x3 convolutions with batch norm, and a shortcut around them. The shortcut is the identity, or a 1x1 convolution
/// if the shape changes (the paper's figure 5 left, option B).
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

/// A 1x1 convolution that narrows, a 3x3 convolution, and a 1x1 convolution to 4 x `width` channels, with a shortcut
/// around them (the paper's figure 5 right). The 3x3 convolution has the stride.
class BottleneckImpl : public torch::nn::Module {
 public:
  BottleneckImpl(std::int64_t in, std::int64_t width, std::int64_t stride);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::Conv2d conv1_, conv2_, conv3_;
  torch::nn::BatchNorm2d norm1_, norm2_, norm3_;
  torch::nn::Sequential shortcut_{nullptr};
};
TORCH_MODULE(Bottleneck);

/// ResNet: a stem, stages of blocks, the mean over the image, and a linear head. The default stem is a 3x3 convolution
/// without pooling, for small images such as CIFAR's 32 x 32. The default config is ResNet-18, of 11 173 962
/// parameters.
class ResNetImpl : public torch::nn::Module {
 public:
  explicit ResNetImpl(const ResNetConfig& config = {});
  /// `images` are [B, channels, H, W]. Returns [B, classes].
  at::Tensor forward(const at::Tensor& images);
  /// `labels` are [B] int64. Returns the mean cross entropy, in fp32.
  at::Tensor forward(const at::Tensor& images, const at::Tensor& labels);

 private:
  bool wide_stem_;
  torch::nn::Conv2d stem_;
  torch::nn::BatchNorm2d norm_;
  torch::nn::Sequential stages_;
  torch::nn::Linear head_;
};
TORCH_MODULE(ResNet);

}  // namespace tessera::models
