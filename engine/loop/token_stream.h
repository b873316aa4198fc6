#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/data/sampler.h"
#include "runtime/data/token_dataset.h"
#include "tessera/token_batches.h"

namespace tessera {

/// The implementation of TokenBatches: a dataset, and the sampler that says which windows this rank takes. One thread
/// at a time uses it.
class TokenStream {
 public:
  /// Makes TokenBatches over a dataset that is open already. The function itself sets `sampling.num_samples`. It fails
  /// with error 65 if the data does not fill one step.
  static absl::StatusOr<TokenBatches> batches_of(std::shared_ptr<const TokenDataset> dataset, std::int64_t seq_len,
                                                 std::int64_t vocab_size, SamplerOptions sampling);
  static const TokenStream& of(const TokenBatches& batches) { return *batches.stream_; }

  /// Returns the next batch: inputs and targets [rows, seq_len] of int64 on `device`, and the weight of this rank's
  /// mean. If an epoch has ended, it begins the next one. Throws tessera::Error if the data cannot be read or holds a
  /// token outside the vocabulary.
  TokenBatch next(at::Device device);
  /// Returns a microbatch of the step under way, by its number (DistributedSampler::take), in the form that `next`
  /// returns.
  TokenBatch of(std::int64_t microbatch, at::Device device);
  void end_step() { sampler_.end_step(); }
  const TokenDataset& dataset() const { return *dataset_; }
  const DistributedSampler& sampler() const { return sampler_; }
  absl::Status deal(const MicrobatchRun& run) { return sampler_.deal(run); }
  absl::Status go_to_step(std::int64_t step) { return sampler_.go_to_step(step); }
  std::int64_t data_order() const { return sampler_.data_order(dataset_->num_tokens(), seq_len_); }
  absl::Status resume(const SamplerCursor& cursor) { return sampler_.resume(cursor); }

 private:
  /// Reads the samples that the sampler has just chosen.
  TokenBatch read(at::Device device);
  TokenStream(std::shared_ptr<const TokenDataset> dataset, std::int64_t seq_len, std::int64_t vocab_size,
              std::int64_t batch, DistributedSampler sampler);

  std::shared_ptr<const TokenDataset> dataset_;
  std::int64_t seq_len_, vocab_size_;
  std::vector<std::int64_t> samples_;
  DistributedSampler sampler_;
};

}  // namespace tessera
