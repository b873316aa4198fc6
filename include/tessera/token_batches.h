#pragma once

#include <ATen/core/Tensor.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/data/sampler.h"
#include "runtime/data/token_dataset.h"

namespace tessera {

/// One microbatch: [batch, seq_len] int64 each, targets[b][t] = the token that follows input[b][t].
struct TokenBatch {
  at::Tensor input, target;
};

/// A dataset dealt out to the ranks as tensors, epoch after epoch, each in an order of its own.
class TokenBatches {
 public:
  /// `sampling.num_samples` is filled in here. 65 if the data does not fill one step.
  static absl::StatusOr<TokenBatches> create(std::shared_ptr<const TokenDataset> dataset, std::int64_t seq_len,
                                             std::int64_t vocab_size, SamplerOptions sampling);

  /// The next microbatch of this rank, on `device` (Engine::device); a copy to a GPU is queued, not waited for, and
  /// in the way of what is computed: Engine::upload is not.
  /// Throws tessera::Error (65) for a token that the vocabulary does not have.
  TokenBatch next(at::Device device = at::Device(at::kCPU));

  std::int64_t epoch() const { return sampler_.epoch(); }
  std::int64_t steps_per_epoch() const { return sampler_.steps_per_epoch(); }
  std::int64_t dropped_samples() const { return sampler_.dropped_samples(); }
  std::int64_t padded_samples() const { return sampler_.padded_samples(); }
  const TokenDataset& dataset() const { return *dataset_; }

 private:
  TokenBatches(std::shared_ptr<const TokenDataset> dataset, std::int64_t seq_len, std::int64_t vocab_size,
               std::int64_t batch, DistributedSampler sampler)
      : dataset_(std::move(dataset)),
        seq_len_(seq_len),
        vocab_size_(vocab_size),
        samples_(batch),
        sampler_(std::move(sampler)) {}

  std::shared_ptr<const TokenDataset> dataset_;
  std::int64_t seq_len_, vocab_size_;
  std::vector<std::int64_t> samples_;
  DistributedSampler sampler_;
};

}  // namespace tessera
