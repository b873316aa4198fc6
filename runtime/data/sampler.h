#pragma once

// See docs/glossary.md: dealt.

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <span>

#include "runtime/data/permutation.h"
#include "runtime/data/token_dataset.h"
#include "tessera/token_options.h"

namespace tessera {

/// Returns the number of samples. Sample i of a dataset is the window of tokens [i * seq_len, i * seq_len + seq_len +
/// 1). It has seq_len inputs and equally many targets, which are the inputs shifted by one token. Neighbouring samples
/// share one token. Each token of the samples is a target once, except the first token of the dataset.
std::int64_t num_windows(std::int64_t num_tokens, std::int64_t seq_len);

/// The order of the samples of an epoch, which depends on nothing but its arguments. The samplers of all kinds take
/// their samples from this order.
class EpochOrder {
 public:
  EpochOrder(std::int64_t num_samples, std::uint64_t seed, bool shuffle, std::int64_t epoch);

  /// Returns the sample at `position`. Positions from the number of samples on give the first samples again.
  std::int64_t operator()(std::int64_t position) const;

 private:
  std::int64_t num_samples_;
  bool shuffle_;
  Permutation shuffled_;
};

/// Deals the samples of an epoch out to the ranks. Each rank has one sampler, with its own `rank`, and one thread at a
/// time uses it. Samplers never communicate.
///
/// Invariants:
///  1. An epoch has one *global order* (EpochOrder): position p holds sample Permutation(num_samples, seed, epoch)(p),
///     or sample p without `shuffle`.
///  2. Microbatch m of the epoch takes positions [m * batch * world_size, (m + 1) * batch * world_size), and rank r has
///     the r-th run of `batch` of these positions. If `runs` is set, rank r instead has the r-th run of `batch *
///     accumulation` of a step's positions, one microbatch after the other. If runs were dealt (by `deal` or
///     SamplerOptions::microbatches), the rank has its run of microbatches. Step k therefore takes the positions
///     [k * G, (k + 1) * G) for every number of ranks and microbatches with the same global batch G. Step k has the
///     same microbatches too if `batch` is the same.
///  3. No sample is given twice within an epoch, to one rank or two, except for the `padded_samples()` of Tail::kPad.
///  4. Every rank gets the same number of microbatches, a multiple of `accumulation`, unless runs were dealt.
class DistributedSampler {
 public:
  /// Errors: 78 if options make no sense, 65 if the samples do not fill a single step under Tail::kDrop.
  static absl::StatusOr<DistributedSampler> create(const SamplerOptions& options);

  /// Writes this rank's next samples and moves on. Returns false, and writes nothing, at the end of the epoch.
  /// REQUIRES: samples.size() == batch.
  bool next(std::span<std::int64_t> samples);
  /// Returns the number of samples, among those that `next` wrote last, that are not repetitions (Tail::kPad). These
  /// samples come first.
  std::int64_t counted() const { return counted_; }

  /// Writes the samples of microbatch number `microbatch` of the step under way, whichever rank they belong to. The
  /// step stays under way until `end_step`. Returns false, and writes nothing, at the end of the epoch. Errors: 78 if
  /// the step has no microbatch of this number, or if `next` has already begun the step. REQUIRES: samples.size() ==
  /// batch.
  absl::StatusOr<bool> take(std::int64_t microbatch, std::span<std::int64_t> samples);
  /// Ends the step under way. If the epoch is already over, the step under way is the first step of the next epoch.
  /// `take` must have given all samples of the step that this rank needs.
  void end_step();

  /// From now on, this rank takes the microbatches of `run` in each step, whatever the options say. Call it between two
  /// steps. SamplerCursor::consumed increases when all microbatches of a run were taken. Errors: 78 if a run is empty
  /// or reaches beyond a step's microbatches, or if the call is made within a step.
  absl::Status deal(const MicrobatchRun& run);
  /// Returns the run of microbatches that this rank takes. It is empty if no run was dealt, by `deal` or by
  /// SamplerOptions::microbatches.
  const MicrobatchRun& run() const { return dealt_; }
  /// Returns whether `next` has given no microbatch of the step under way.
  bool is_between_steps() const { return taken_ == 0 && (consumed_ - begin_) % options_.global_batch() == 0; }

  /// Starts `epoch` from its first sample.
  void set_epoch(std::int64_t epoch);
  /// Moves to the beginning of a step, counted from 0 over all epochs. Error: 78 if the number is below 0.
  absl::Status go_to_step(std::int64_t step);
  /// Returns a number, at least 0, that stands for the data of all steps. If two samplers have the same number, their
  /// steps with the same index have the same samples. `tokens`, `seq_len`: those of the dataset whose windows the
  /// samples are.
  std::int64_t data_order(std::int64_t tokens, std::int64_t seq_len) const;
  std::int64_t epoch() const { return epoch_; }
  /// Returns whether this epoch has no further step.
  bool is_over() const { return consumed_ >= end_; }

  std::int64_t steps_per_epoch() const;
  /// Returns the number of samples that are seen twice (kPad) or not at all (kDrop) in a whole epoch.
  std::int64_t padded_samples() const;
  std::int64_t dropped_samples() const;

  SamplerCursor cursor() const;
  /// Continues after `cursor`, which may come from another number of ranks or another batch. The global order continues
  /// where it stopped, provided that `cursor` was taken between two steps. Errors: 78 if seed, shuffling or samples
  /// differ; 65 if the numbers of `cursor` make no sense.
  absl::Status resume(const SamplerCursor& cursor);

 private:
  explicit DistributedSampler(const SamplerOptions& options);
  void start(std::int64_t epoch, std::int64_t consumed);
  void write(std::int64_t first, std::span<std::int64_t> samples);
  /// Returns the position of this rank's next sample.
  std::int64_t next_position() const;

  SamplerOptions options_;
  EpochOrder order_;
  std::int64_t epoch_ = 0;
  std::int64_t consumed_ = 0;
  std::int64_t begin_ = 0;  ///< value of consumed_ when the epoch began or was resumed, between two steps
  std::int64_t counted_ = 0;
  MicrobatchRun dealt_;     ///< empty: no run was dealt
  std::int64_t taken_ = 0;  ///< number of microbatches of the dealt run that were taken in this step
  std::int64_t end_ = 0;    ///< end of this epoch's last whole step, counted like consumed_
};

/// Writes windows of tokens: `tokens[s * (seq_len + 1) ...] = window of samples[s]`. REQUIRES: tokens.size() ==
/// samples.size() * (seq_len + 1). Errors: 70 if the dataset does not have a sample; 65, with file and offset, if a
/// token is outside of [0, vocab_size) and `vocab_size` > 0.
absl::Status copy_windows(const TokenDataset& dataset, std::span<const std::int64_t> samples, std::int64_t seq_len,
                          std::span<std::int64_t> tokens, std::int64_t vocab_size = 0);

}  // namespace tessera
