#pragma once

// See docs/glossary.md: dealt.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/data/sampler.h"
#include "tessera/token_options.h"

namespace tessera {

/// Gives loaders the samples of whole microbatches, dealt out to ranks by steps: the implementation of RankSampler with
/// RankSamplerOptions::microbatches, of StepSampler, and of Python's RankSampler. It begins the next epoch when one has
/// ended, which DistributedSampler does not do. It also reports a loader that takes samples of a later step before
/// these samples are dealt. One thread at a time uses it.
class DealtSamples {
 public:
  using Samples = std::vector<std::size_t>;

  /// The first call of `begin_epoch` begins epoch `epoch`. Throws tessera::Error as DistributedSampler::create does; 78
  /// if `options` give no number of microbatches.
  DealtSamples(const SamplerOptions& options, std::int64_t epoch);

  /// Begins the next epoch; the first call begins the first epoch. A call right after `resume` continues the epoch of
  /// the cursor, unless that epoch has ended.
  void begin_epoch();
  /// Returns the samples of this rank's next microbatch; nothing at the end of the epoch.
  std::optional<Samples> next();

  /// Returns the samples of a microbatch of the step under way, by its number (DistributedSampler::take). If the epoch
  /// has ended, the next epoch begins.
  Samples of(std::int64_t microbatch);
  /// Moves to the next step, if `of` gave the samples of this step.
  void end_step() { sampler_.end_step(); }
  /// Moves to a step, counted from 0 over all epochs. Throws tessera::Error (78) for a number below 0.
  void go_to_step(std::int64_t step);

  /// Gives this rank the microbatches of `run` from the next step on. Throws tessera::Error: 78 as
  /// DistributedSampler::deal does; 64 if samples of more than one step were given since the last call.
  void deal(const MicrobatchRun& run);

  /// Changes the number of samples. The next `begin_epoch` begins an epoch of `num_samples` samples.
  void resize(std::int64_t num_samples);

  std::int64_t epoch() const { return sampler_.epoch(); }
  std::int64_t steps_per_epoch() const { return sampler_.steps_per_epoch(); }
  /// Returns the number of microbatches of this rank in a whole epoch, if the microbatches that it takes in each step
  /// (`deal`) stay the same.
  std::int64_t microbatches_per_epoch() const;
  /// Returns the position of the step under way in the run's samples, for a checkpoint. The end of an epoch counts as
  /// the beginning of the next one.
  SamplerCursor cursor() const;
  /// Continues at `cursor`, on any number of ranks. Throws tessera::Error as DistributedSampler::resume does.
  void resume(const SamplerCursor& cursor);

 private:
  void take_place();

  SamplerOptions options_;
  DistributedSampler sampler_;
  std::vector<std::int64_t> samples_;  ///< [batch]: the samples of the microbatch that was given last
  std::int64_t steps_given_ = 0;       ///< number of steps since the last `deal` in which all microbatches of this rank
                                       ///< were given
  bool has_begun_ = false;             ///< whether the first epoch has begun
  bool goes_on_ = false;               ///< whether `resume` was called, and no sample was given since then
};

}  // namespace tessera
