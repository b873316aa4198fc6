#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/data/sampler.h"
#include "runtime/data/token_dataset.h"
#include "tessera/token_batches.h"

namespace tessera {

/// The inside of TokenBatches: a dataset and the sampler that deals it out.
class TokenStream {
 public:
  /// TokenBatches over a dataset that is open already. `sampling.num_samples` is filled in here. 65 if the data does not
  /// fill one step.
  static absl::StatusOr<TokenBatches> batches_of(std::shared_ptr<const TokenDataset> dataset, std::int64_t seq_len,
                                                 std::int64_t vocab_size, SamplerOptions sampling);
  static const TokenStream& of(const TokenBatches& batches) { return *batches.stream_; }

  TokenBatch next(at::Device device);
  const TokenDataset& dataset() const { return *dataset_; }
  const DistributedSampler& sampler() const { return sampler_; }
  absl::Status resume(const SamplerCursor& cursor) { return sampler_.resume(cursor); }

 private:
  TokenStream(std::shared_ptr<const TokenDataset> dataset, std::int64_t seq_len, std::int64_t vocab_size,
              std::int64_t batch, DistributedSampler sampler);

  std::shared_ptr<const TokenDataset> dataset_;
  std::int64_t seq_len_, vocab_size_;
  std::vector<std::int64_t> samples_;
  DistributedSampler sampler_;
};

}  // namespace tessera
