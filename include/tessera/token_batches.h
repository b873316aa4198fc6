#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>

#include "tessera/token_options.h"

namespace tessera {

class TokenStream;

/// One microbatch: [batch, seq_len] int64 each, targets[b][t] = the token that follows input[b][t].
///
///   engine.backward(loss, {.tokens = batch.input.numel(), .weight = batch.weight});
///
/// In the last step of an epoch, with Tail::kPad, it has only the samples that are left, and its weight says how many; a rank for which none
/// is left gets samples a second time, with weight 0.
struct TokenBatch {
  at::Tensor input, target;
  double weight = 1.0;  ///< MicrobatchInfo::weight: tokens that count, as a part of a full microbatch's
};

/// Tokens on disk, given to the ranks as tensors, epoch after epoch. Every epoch has an order of its own. Sample i is the
/// window of tokens [i * seq_len, i * seq_len + seq_len + 1).
class TokenBatches {
 public:
  /// Opens `data`. Throws tessera::Error: 66 if it is missing, 77 without permission, 65 if its content is wrong or does
  /// not fill one step, 78 for `sampling` that makes no sense. `vocab_size`: tokens must be below it; 0: any.
  TokenBatches(const std::filesystem::path& data, std::int64_t seq_len, std::int64_t vocab_size,
               const SamplerOptions& sampling, const DatasetOptions& options = {});
  TokenBatches(TokenBatches&&) noexcept;
  TokenBatches& operator=(TokenBatches&&) noexcept;
  ~TokenBatches();

  /// The next microbatch of this rank, on `device` (Engine::device). A copy to a GPU runs on the compute stream, so what is
  /// queued after it waits for it. To copy while the GPU computes, use Engine::upload.
  /// Throws tessera::Error (65) for a token that the vocabulary does not have.
  TokenBatch next(at::Device device = at::Device(at::kCPU));

  /// Where the next microbatch comes from, for a checkpoint. Taken between two steps, it holds for any number of ranks.
  SamplerCursor cursor() const;
  /// Goes on behind `cursor`. Throws tessera::Error: 78 if the number of samples, the seed or shuffling is another; 65 if the
  /// numbers make no sense.
  void resume(const SamplerCursor& cursor);

  std::int64_t num_tokens() const;
  std::int64_t epoch() const;
  std::int64_t steps_per_epoch() const;
  std::int64_t dropped_samples() const;
  std::int64_t padded_samples() const;

 private:
  friend class TokenStream;
  explicit TokenBatches(std::unique_ptr<TokenStream> stream);
  std::unique_ptr<TokenStream> stream_;
};

}  // namespace tessera
