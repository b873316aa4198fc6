#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "tessera/mesh.h"
#include "tessera/strategy.h"

namespace tessera::app {

/// Inputs and targets: images [B, 3, 32, 32] and labels [B], or tokens [B, T] and the tokens that follow.
struct LabelledBatch {
  at::Tensor input, target;
};

/// A model that the bucket study trains, and its data.
struct BucketWorkload {
  std::string name;  ///< "resnet18" or "gpt"
  std::string data;  ///< one line that describes the data
  std::shared_ptr<torch::nn::Module> module;
  OptimizerConfig optimizer;
  std::function<at::Tensor(const at::Tensor& input)> logits;  ///< [..., classes]
  std::function<LabelledBatch()> next;                        ///< this rank's next batch
  std::function<LabelledBatch()> next_held_out;               ///< batches of data on which training never runs

  /// Returns the mean cross entropy, a scalar.
  at::Tensor loss(const LabelledBatch& batch) const;
};

/// The source of images.
struct ImageSource {
  std::string cifar10;  ///< folder of CIFAR-10's binary files; empty: images are generated
  std::uint64_t seed = 1;
};

/// Returns a ResNet-18 for 32 x 32 images, 4 images a rank; `small`: an eighth of its width. Throws tessera::Error for
/// files that cannot be used.
BucketWorkload resnet_workload(const Mesh& mesh, const ImageSource& source, bool small);

/// Returns a GPT of 10.6 million parameters on 64 tokens a rank, from a Markov chain that can be learnt. Each of 64
/// tokens has one successor seven times in eight, and any of the 64 tokens otherwise. `small`: 0.2 million.
BucketWorkload gpt_workload(const Mesh& mesh, std::uint64_t seed, bool small);

}  // namespace tessera::app
