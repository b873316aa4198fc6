#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstdint>
#include <span>

#include "runtime/data/permutation.h"
#include "runtime/data/token_dataset.h"
#include "tessera/token_options.h"

namespace tessera {

/// Sample i of a dataset is the window of tokens [i * seq_len, i * seq_len + seq_len + 1): seq_len inputs and, one
/// further, as many targets. Neighbours share one token, and every token but the first is a target once.
std::int64_t num_windows(std::int64_t num_tokens, std::int64_t seq_len);

/// Deals the samples of an epoch out to the ranks. Each rank has one, with its own `rank`; they never talk.
///
/// Invariants:
///  1. One *global order* an epoch: position p holds sample Permutation(num_samples, seed, epoch)(p). It depends on
///     nothing but num_samples, seed and epoch.
///  2. Microbatch m of the epoch takes positions [m * batch * world_size, (m + 1) * batch * world_size), of which rank
///     r has the r-th run of `batch`. So step k consumes the positions [k * G, (k + 1) * G) for every number of ranks
///     and microbatches with the same global batch G, and in the same order if `batch` is the same.
///  3. Within an epoch no sample is given twice, to one rank or two, but for the `padded_samples()` of Tail::kPad.
///  4. Every rank gets the same number of microbatches, a multiple of `accumulation`.
class DistributedSampler {
 public:
  /// 78 for options that make no sense, 65 if the samples do not fill a single step (and Tail::kDrop).
  static absl::StatusOr<DistributedSampler> create(const SamplerOptions& options);

  /// Writes this rank's next samples and moves on. False, and nothing written, at the end of the epoch.
  /// REQUIRES: samples.size() == batch.
  bool next(std::span<std::int64_t> samples);
  /// How many of the samples that `next` wrote last are no repetition (Tail::kPad): the first ones.
  std::int64_t counted() const { return counted_; }

  /// Starts `epoch` from its first sample.
  void set_epoch(std::int64_t epoch);
  std::int64_t epoch() const { return epoch_; }

  std::int64_t steps_per_epoch() const;
  /// Samples seen twice (kPad) or not at all (kDrop) in a whole epoch.
  std::int64_t padded_samples() const;
  std::int64_t dropped_samples() const;

  SamplerCursor cursor() const;
  /// Goes on behind `cursor`, which may come from another number of ranks or another batch: the global order continues
  /// where it stopped, provided that it was taken between two steps. 78 if seed, shuffling or samples differ.
  absl::Status resume(const SamplerCursor& cursor);

  /// The sample at `position` of this epoch's global order. Positions beyond num_samples start again (kPad).
  std::int64_t sample_at(std::int64_t position) const;

 private:
  explicit DistributedSampler(const SamplerOptions& options);
  void start(std::int64_t epoch, std::int64_t consumed);

  SamplerOptions options_;
  Permutation order_;
  std::int64_t epoch_ = 0;
  std::int64_t consumed_ = 0;
  std::int64_t counted_ = 0;
  std::int64_t end_ = 0;  ///< where this epoch's last whole step ends, counted as consumed_ is
};

/// `tokens[s * (seq_len + 1) ...] = window of samples[s]`.
/// REQUIRES: tokens.size() == samples.size() * (seq_len + 1). 70 for a sample the dataset does not have.
/// If `vocab_size` > 0, a token outside of [0, vocab_size) is an error (65) that names file and offset.
absl::Status copy_windows(const TokenDataset& dataset, std::span<const std::int64_t> samples, std::int64_t seq_len,
                          std::span<std::int64_t> tokens, std::int64_t vocab_size = 0);

}  // namespace tessera
