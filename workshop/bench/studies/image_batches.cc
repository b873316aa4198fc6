#include "workshop/bench/studies/image_batches.h"

#include <ATen/ops/empty.h>

#include "runtime/base/status.h"

namespace tessera::app {

absl::StatusOr<ImageBatches> ImageBatches::create(std::shared_ptr<const ImageDataset> dataset,
                                                  SamplerOptions sampling) {
  sampling.num_samples = dataset->num_images();
  TESSERA_ASSIGN_OR_RETURN(DistributedSampler sampler, DistributedSampler::create(sampling));
  return ImageBatches(std::move(dataset), sampling.batch, sampler);
}

ImageBatch ImageBatches::next() {
  if (!sampler_.next(samples_)) {
    sampler_.set_epoch(sampler_.epoch() + 1);
    TORCH_INTERNAL_ASSERT(sampler_.next(samples_), "an epoch has no sample");
  }
  const auto count = static_cast<std::int64_t>(samples_.size());
  const ImageBatch batch{at::empty({count, ImageDataset::kChannels, ImageDataset::kSide, ImageDataset::kSide}),
                         at::empty({count}, at::kLong)};
  auto* const pixels = batch.images.mutable_data_ptr<float>();
  auto* const labels = batch.labels.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    labels[i] = dataset_->copy(samples_[i], {pixels + i * ImageDataset::kNumel, ImageDataset::kNumel});
  }
  return batch;
}

}  // namespace tessera::app
