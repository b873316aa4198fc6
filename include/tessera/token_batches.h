#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <memory>

#include "tessera/token_options.h"

namespace tessera {

class TokenStream;

/// One microbatch of tokens; target[b][t] is the token that follows input[b][t].
///
///   engine.backward(loss, {.tokens = batch.input.numel(), .weight = batch.weight});
///
/// Tail::kPad makes the last step of an epoch smaller: its microbatches have only the samples that are left, and
/// `weight` is lower accordingly. A rank without any sample left gets samples a second time, with weight 0.
struct TokenBatch {
  at::Tensor input, target;  ///< [batch, seq_len], int64
  double weight = 1.0;       ///< value for MicrobatchInfo::weight: the fraction of a full microbatch's tokens that
                             ///< count
};

/// Gives ranks the tokens of a data set on disk as tensors, epoch after epoch. If samples are shuffled, every epoch has
/// another order. Sample i is the window of tokens [i * seq_len, i * seq_len + seq_len + 1). Each rank has its own
/// object, used by one thread at a time; ranks do not communicate.
class TokenBatches {
 public:
  /// Opens `data`. Throws tessera::Error: 66 if the file is missing; 77 without permission; 65 if its content is wrong
  /// or does not fill one step; 78 if `sampling` is invalid. Tokens must be below `vocab_size`; 0 allows any token.
  TokenBatches(const std::filesystem::path& data, std::int64_t seq_len, std::int64_t vocab_size,
               const SamplerOptions& sampling, const DatasetOptions& options = {});
  TokenBatches(TokenBatches&&) noexcept;
  TokenBatches& operator=(TokenBatches&&) noexcept;
  ~TokenBatches();

  /// Returns the next microbatch of this rank, on `device` (Engine::device). A copy to a GPU runs on the compute
  /// stream, so operators that are queued after this call wait for the copy. Use Engine::upload to copy while the GPU
  /// computes. Throws tessera::Error (65) for a token that the vocabulary does not have.
  TokenBatch next(at::Device device = at::Device(at::kCPU));

  /// Returns the microbatch with this number (Engine::microbatch) among those of the current step on all ranks. It may
  /// belong to any rank, since ranks may compute each other's microbatches ("deal.backups"). The step lasts until
  /// `end_step`, which all ranks call after Engine::step. `cursor` returns the step's beginning until then. Throws
  /// Error (78) if the step has no microbatch of this number, or if `next` has already begun the step.
  ///
  ///   while (!engine.step_is_due()) {
  ///     const tessera::TokenBatch batch = batches.of(engine.microbatch());
  ///     engine.backward(loss_of(batch), {.weight = batch.weight});
  ///   }
  ///   engine.step();
  ///   batches.end_step();
  TokenBatch of(std::int64_t microbatch, at::Device device = at::Device(at::kCPU));
  /// Ends the step whose microbatches `of` returned. All ranks call it after Engine::step.
  void end_step();

  /// Makes this rank take the microbatches of `run` in each step (Engine::microbatches, with "deal" by speed), from the
  /// next microbatch on. `next` continues with this rank's microbatches of the following step when it has returned all
  /// microbatches of the run. All ranks call it between two steps. `cursor` then returns the step's beginning until
  /// this rank has taken the whole run. Throws Error (78) if no step has such a run, and for a call within a step.
  void deal(const MicrobatchRun& run);

  /// Goes to the first microbatch of step number `step`. Steps are counted from 0 over all epochs (Engine::take_step,
  /// for workers that may come and go during the run). Each step has its own samples, whichever worker computes it.
  /// Throws Error (78) for a number below 0.
  void go_to_step(std::int64_t step);
  /// Returns a number that identifies the data of all steps (Engine::take_step). Two objects with the same number have
  /// the same samples in each step. The call does not read the tokens.
  std::int64_t data_order() const;

  /// Returns the position of the next microbatch, for a checkpoint. A cursor taken between two steps is valid for any
  /// number of ranks.
  SamplerCursor cursor() const;
  /// Continues with the samples after `cursor`. Throws tessera::Error: 78 if the number of samples, the seed or
  /// shuffling differs; 65 if the cursor's numbers are invalid.
  void resume(const SamplerCursor& cursor);

  /// Returns the number of tokens in the data set.
  std::int64_t num_tokens() const;
  /// Returns the current epoch, counted from 0.
  std::int64_t epoch() const;
  /// Returns the number of optimizer steps in an epoch.
  std::int64_t steps_per_epoch() const;
  /// Returns the number of samples that an epoch leaves out (Tail::kDrop); 0 with kPad.
  std::int64_t dropped_samples() const;
  /// Returns the number of samples that are missing in the last step of an epoch (Tail::kPad); 0 with kDrop.
  std::int64_t padded_samples() const;

 private:
  friend class TokenStream;
  explicit TokenBatches(std::unique_ptr<TokenStream> stream);
  std::unique_ptr<TokenStream> stream_;
};

}  // namespace tessera
