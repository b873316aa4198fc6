#include "workshop/bench/studies/bucket_workload.h"

#include <ATen/Context.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "runtime/base/noise.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "runtime/data/permutation.h"
#include "workshop/bench/images/image_dataset.h"
#include "workshop/bench/studies/step_study.h"
#include "workshop/models/gpt.h"
#include "workshop/models/resnet.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kImagesARank = 4;
constexpr std::int64_t kTrainingImages = 4000, kHeldOutImages = 1000;
constexpr std::int64_t kChainTokens = 64;
constexpr std::uint64_t kHeldOut = std::uint64_t{1} << 40;  // samples from this number on are held out

std::shared_ptr<const ImageDataset> images_of(const ImageSource& source, bool held_out) {
  if (!source.cifar10.empty()) {
    return value_or_throw(open_cifar10(source.cifar10, held_out ? Cifar10Split::kTest : Cifar10Split::kTrain));
  }
  return generate_images(source.seed, held_out ? kTrainingImages : 0, held_out ? kHeldOutImages : kTrainingImages);
}

std::shared_ptr<ImageBatches> deal(std::shared_ptr<const ImageDataset> images, const Mesh& mesh, std::uint64_t seed) {
  SamplerOptions sampling;
  sampling.batch = kImagesARank;
  sampling.rank = mesh.rank();
  sampling.world_size = mesh.world_size();
  sampling.seed = seed;
  return std::make_shared<ImageBatches>(value_or_throw(ImageBatches::create(std::move(images), sampling)));
}

std::function<LabelledBatch()> dealing(std::shared_ptr<ImageBatches> batches) {
  return [batches = std::move(batches)]() -> LabelledBatch {
    ImageBatch batch = batches->next();
    return {std::move(batch.images), std::move(batch.labels)};
  };
}

/// Returns sample `number` of the chain: [1, seq_len] inputs and targets.
LabelledBatch chain_sample(std::uint64_t seed, std::uint64_t number, std::int64_t seq_len) {
  const Permutation successor(kChainTokens, seed, 0);
  std::uint64_t state = mix_bits(mix_bits(seed) + number);
  const at::Tensor tokens = at::empty({1, seq_len + 1}, at::kLong);
  auto* const out = tokens.mutable_data_ptr<std::int64_t>();
  for (std::int64_t t = 0; t <= seq_len; ++t) {
    state = mix_bits(state + 0x9e3779b97f4a7c15u);
    const bool follows = t > 0 && state % 8 != 0;
    out[t] = static_cast<std::int64_t>(follows ? successor(static_cast<std::uint64_t>(out[t - 1]))
                                               : (state >> 8) % kChainTokens);
  }
  return {tokens.narrow(1, 0, seq_len).contiguous(), tokens.narrow(1, 1, seq_len).contiguous()};
}

std::function<LabelledBatch()> chain(const Mesh& mesh, std::uint64_t seed, std::uint64_t first, std::int64_t seq_len) {
  return [seed, seq_len, next = first + static_cast<std::uint64_t>(mesh.rank()),
          ranks = static_cast<std::uint64_t>(mesh.world_size())]() mutable {
    return chain_sample(seed, std::exchange(next, next + ranks), seq_len);
  };
}

}  // namespace

at::Tensor BucketWorkload::loss(const LabelledBatch& batch) const {
  return at::cross_entropy_loss(logits(batch.input).flatten(0, -2), batch.target.flatten());
}

BucketWorkload resnet_workload(const Mesh& mesh, const ImageSource& source, bool small) {
  at::manual_seed(source.seed);
  models::ResNet model(small ? models::ResNetConfig{.width = 8} : models::ResNetConfig{});
  const auto training = deal(images_of(source, false), mesh, source.seed);
  BucketWorkload work;
  work.name = "resnet18";
  work.data = training->dataset().describe() + ", " + std::to_string(kImagesARank) + " a rank";
  work.module = model.ptr();
  work.optimizer.type = OptimizerType::kSgd;
  work.optimizer.lr = 0.01;
  work.optimizer.momentum = 0.9;
  work.logits = [model](const at::Tensor& images) mutable { return model->forward(images); };
  work.next = dealing(training);
  work.next_held_out = dealing(deal(images_of(source, true), mesh, source.seed));
  return work;
}

BucketWorkload gpt_workload(const Mesh& mesh, std::uint64_t seed, bool small) {
  at::manual_seed(seed);
  const models::GPTConfig config = studied_gpt(small);
  models::GPT model(config);
  BucketWorkload work;
  work.name = "gpt";
  work.data = "a chain of " + std::to_string(kChainTokens) + " tokens, " + std::to_string(config.seq_len) + " a rank";
  work.module = model.ptr();
  work.optimizer.lr = 3e-4;
  work.logits = [model](const at::Tensor& tokens) mutable { return model->logits(tokens); };
  work.next = chain(mesh, seed, 0, config.seq_len);
  work.next_held_out = chain(mesh, seed, kHeldOut, config.seq_len);
  return work;
}

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
