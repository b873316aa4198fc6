#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/data/sampler.h"
#include "tessera/mesh.h"
#include "tessera/strategy.h"
#include "workshop/bench/images/image_dataset.h"

namespace tessera::app {

/// Inputs and targets. They are images [B, 3, 32, 32] and labels [B], or tokens [B, T] and the tokens that follow them.
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

/// Returns a ResNet-18 for 32 x 32 images, with 4 images on each rank. If `small` is true, the model has an eighth of
/// the width. Throws tessera::Error if files cannot be used.
BucketWorkload resnet_workload(const Mesh& mesh, const ImageSource& source, bool small);

/// Returns a GPT of 10.6 million parameters, with 64 tokens on each rank. The tokens come from a Markov chain that can
/// be learnt. Each of 64 tokens is followed by one fixed token seven times in eight, and by any of the 64 tokens
/// otherwise. If `small` is true, the GPT has 0.2 million parameters, and each rank has 32 tokens.
BucketWorkload gpt_workload(const Mesh& mesh, std::uint64_t seed, bool small);

/// Images [B, 3, 32, 32] fp32, normalised, and labels [B] int64.
struct ImageBatch {
  at::Tensor images, labels;
};

/// Deals a dataset of images out to the ranks as tensors, epoch after epoch, each epoch in another order.
class ImageBatches {
 public:
  /// Fills in `sampling.num_samples` itself. The function fails with error 65 if the images do not fill one step.
  static absl::StatusOr<ImageBatches> create(std::shared_ptr<const ImageDataset> dataset, SamplerOptions sampling);

  /// Returns the next microbatch of this rank.
  ImageBatch next();
  const ImageDataset& dataset() const { return *dataset_; }

 private:
  ImageBatches(std::shared_ptr<const ImageDataset> dataset, std::int64_t batch, DistributedSampler sampler)
      : dataset_(std::move(dataset)), samples_(batch), sampler_(sampler) {}

  std::shared_ptr<const ImageDataset> dataset_;
  std::vector<std::int64_t> samples_;
  DistributedSampler sampler_;
};

}  // namespace tessera::app
