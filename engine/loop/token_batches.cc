#include "tessera/token_batches.h"

#include <ATen/ops/empty.h>

#include <span>
#include <utility>

#include "engine/device/data_seconds.h"
#include "engine/loop/token_stream.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {

TokenStream::TokenStream(std::shared_ptr<const TokenDataset> dataset, std::int64_t seq_len, std::int64_t vocab_size,
                         std::int64_t batch, DistributedSampler sampler)
    : dataset_(std::move(dataset)), seq_len_(seq_len), vocab_size_(vocab_size), samples_(batch), sampler_(sampler) {}

absl::StatusOr<TokenBatches> TokenStream::batches_of(std::shared_ptr<const TokenDataset> dataset, std::int64_t seq_len,
                                                     std::int64_t vocab_size, SamplerOptions sampling) {
  sampling.num_samples = num_windows(dataset->num_tokens(), seq_len);
  TESSERA_ASSIGN_OR_RETURN(DistributedSampler sampler, DistributedSampler::create(sampling));
  return TokenBatches(
      std::unique_ptr<TokenStream>(new TokenStream(std::move(dataset), seq_len, vocab_size, sampling.batch, sampler)));
}

TokenBatch TokenStream::next(at::Device device) {
  if (!sampler_.next(samples_)) {
    sampler_.set_epoch(sampler_.epoch() + 1);
    TORCH_INTERNAL_ASSERT(sampler_.next(samples_), "an epoch has no sample");
  }
  return read(device);
}

TokenBatch TokenStream::of(std::int64_t microbatch, at::Device device) {
  if (!value_or_throw(sampler_.take(microbatch, samples_))) {
    sampler_.set_epoch(sampler_.epoch() + 1);
    TORCH_INTERNAL_ASSERT(value_or_throw(sampler_.take(microbatch, samples_)), "an epoch has no sample");
  }
  return read(device);
}

TokenBatch TokenStream::read(at::Device device) {
  const auto batch = static_cast<std::int64_t>(samples_.size());
  const std::int64_t counted = sampler_.counted(), rows = counted > 0 ? counted : batch;
  const double weight = static_cast<double>(counted) / static_cast<double>(batch);
  const at::Tensor windows = at::empty({rows, seq_len_ + 1}, at::kLong);
  const std::span<std::int64_t> tokens(windows.mutable_data_ptr<std::int64_t>(), windows.numel());
  throw_if_error(copy_windows(*dataset_, std::span(samples_).first(static_cast<std::size_t>(rows)), seq_len_, tokens,
                              vocab_size_));
  const at::Tensor there = device.is_cpu() ? windows : windows.pin_memory().to(device, /*non_blocking=*/true);
  return {there.narrow(1, 0, seq_len_).contiguous(), there.narrow(1, 1, seq_len_).contiguous(), weight};
}

TokenBatches::TokenBatches(const std::filesystem::path& data, std::int64_t seq_len, std::int64_t vocab_size,
                           const SamplerOptions& sampling, const DatasetOptions& options)
    : TokenBatches(value_or_throw(
          TokenStream::batches_of(value_or_throw(open_dataset(data, options)), seq_len, vocab_size, sampling))) {}

TokenBatches::TokenBatches(std::unique_ptr<TokenStream> stream) : stream_(std::move(stream)) {}
TokenBatches::TokenBatches(TokenBatches&&) noexcept = default;
TokenBatches& TokenBatches::operator=(TokenBatches&&) noexcept = default;
TokenBatches::~TokenBatches() = default;

TokenBatch TokenBatches::next(at::Device device) {
  const Span span("batch", {}, &data_seconds_of_this_thread().batches);
  return stream_->next(device);
}
TokenBatch TokenBatches::of(std::int64_t microbatch, at::Device device) {
  const Span span("batch", {}, &data_seconds_of_this_thread().batches);
  return stream_->of(microbatch, device);
}
void TokenBatches::end_step() { stream_->end_step(); }
void TokenBatches::deal(const MicrobatchRun& run) { throw_if_error(stream_->deal(run)); }
void TokenBatches::go_to_step(std::int64_t step) { throw_if_error(stream_->go_to_step(step)); }
std::int64_t TokenBatches::data_order() const { return stream_->data_order(); }
SamplerCursor TokenBatches::cursor() const { return stream_->sampler().cursor(); }
void TokenBatches::resume(const SamplerCursor& cursor) { throw_if_error(stream_->resume(cursor)); }
std::int64_t TokenBatches::num_tokens() const { return stream_->dataset().num_tokens(); }
std::int64_t TokenBatches::epoch() const { return stream_->sampler().epoch(); }
std::int64_t TokenBatches::steps_per_epoch() const { return stream_->sampler().steps_per_epoch(); }
std::int64_t TokenBatches::dropped_samples() const { return stream_->sampler().dropped_samples(); }
std::int64_t TokenBatches::padded_samples() const { return stream_->sampler().padded_samples(); }

}  // namespace tessera
