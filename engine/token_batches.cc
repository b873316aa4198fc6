#include "tessera/token_batches.h"

#include <ATen/ops/empty.h>

#include <span>
#include <utility>

#include "tessera/error.h"

namespace tessera {

absl::StatusOr<TokenBatches> TokenBatches::create(std::shared_ptr<const TokenDataset> dataset, std::int64_t seq_len,
                                                  std::int64_t vocab_size, SamplerOptions sampling) {
  sampling.num_samples = num_windows(dataset->num_tokens(), seq_len);
  TESSERA_ASSIGN_OR_RETURN(DistributedSampler sampler, DistributedSampler::create(sampling));
  return TokenBatches(std::move(dataset), seq_len, vocab_size, sampling.batch, std::move(sampler));
}

TokenBatch TokenBatches::next(at::Device device) {
  if (!sampler_.next(samples_)) {
    sampler_.set_epoch(sampler_.epoch() + 1);
    TORCH_INTERNAL_ASSERT(sampler_.next(samples_), "an epoch has no sample");
  }
  const auto batch = static_cast<std::int64_t>(samples_.size());
  const at::Tensor windows = at::empty({batch, seq_len_ + 1}, at::kLong);
  const std::span<std::int64_t> tokens(windows.mutable_data_ptr<std::int64_t>(), windows.numel());
  throw_if_error(copy_windows(*dataset_, samples_, seq_len_, tokens, vocab_size_));
  const at::Tensor there = device.is_cpu() ? windows : windows.pin_memory().to(device, /*non_blocking=*/true);
  return {there.narrow(1, 0, seq_len_).contiguous(), there.narrow(1, 1, seq_len_).contiguous()};
}

}  // namespace tessera
