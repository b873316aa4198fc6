#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/data/sampler.h"
#include "workshop/bench/images/image_dataset.h"

namespace tessera::app {

/// Images [B, 3, 32, 32] fp32, normalised, and labels [B] int64.
struct ImageBatch {
  at::Tensor images, labels;
};

/// Deals a dataset of images out to the ranks as tensors, epoch after epoch, each epoch in another order.
class ImageBatches {
 public:
  /// Fills in `sampling.num_samples` itself. It fails with error 65 if the images do not fill one step.
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
