#pragma once

// See docs/glossary.md: dealt.

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/token_options.h"

namespace tessera {

class DealtSamples;

/// The way in which a RankSampler orders and deals samples.
struct RankSamplerOptions {
  std::uint64_t seed = 0;  ///< seed of the shuffle; the same on all ranks
  bool shuffle = true;     ///< false: samples come in the order of the dataset
  Tail tail = Tail::kPad;  ///< what happens to the last samples of an epoch if not every rank can get one
  std::int64_t epoch = 0;  ///< epoch that the first `reset` begins; a job that goes on gives that in which it stopped
  /// Above 0: whole microbatches are dealt out, and this many are a step of all ranks: gradient_accumulation times
  /// ranks, or "deal.microbatches". Strategy::reproducible and "deal" by speed need it.
  std::int64_t microbatches = 0;
  std::int64_t batch = 0;  ///< with `microbatches`: samples of a microbatch, which the DataLoader takes at a time
};

/// Deals the samples of a dataset out to the ranks, for LibTorch's DataLoader. The DataLoader calls it on the thread
/// that iterates:
///
///   auto data = MyDataset(...).map(torch::data::transforms::Stack<>());
///   auto loader = torch::data::make_data_loader(data, tessera::RankSampler(*data.size(), mesh), /*batch_size=*/32);
///   for (int epoch = 0; epoch < epochs; ++epoch)
///     for (auto& batch : *loader) ...                 // this rank's share, in another order each epoch
///
/// It keeps these rules of PyTorch's DistributedSampler:
/// 1. Every sample of an epoch is given to exactly one rank, except a few, fewer than there are ranks: Tail::kPad gives
///    the first ones of the order twice (more often if there are fewer samples than ranks), and Tail::kDrop leaves the
///    last ones out.
/// 2. Every rank gets the same number of samples and so of batches, and the last batches have the same size.
///    Engine::evaluate and tessera::uneven allow ranks with different numbers of samples, so there Tail::kPad gives no
///    sample twice, and some ranks get one sample less.
/// 3. The order depends only on the number of samples, the seed and the epoch. Sample number p of the order belongs to
///    rank p mod world_size.
///
/// A program need not call set_epoch: each `reset`, which the DataLoader makes when an iteration begins, begins the
/// next epoch. The first one begins `options.epoch`. (LibTorch's own DistributedRandomSampler gives every epoch the
/// same order, since a program cannot reach it inside a DataLoader.)
///
/// A program that saves in the middle of an epoch keeps a second sampler and takes from it what the training loop
/// takes. The loader's own sampler runs ahead, and cannot be reached.
///
///   tessera::RankSampler place(*data.size(), mesh);
///   if (resumed) place.resume(*loaded.items.data);
///   auto loader = torch::data::make_data_loader(data, place, batch_size);   // a copy
///   while (place.epoch() < epochs) {
///     for (auto& batch : *loader) {                                         // at first: the rest of the epoch
///       ...
///       place.next(batch_size);
///       tessera::save_checkpoint(engine, folder, {.data = place.cursor()});
///     }
///     place.reset();
///   }
///
/// With RankSamplerOptions::microbatches it deals whole microbatches out in place of samples, so that what a microbatch
/// holds depends on neither the number of ranks nor who computes it. Microbatch m of an epoch's step k has the `batch`
/// samples from number (k * microbatches + m) * batch of the order on. A rank takes neighbouring microbatches: at first
/// as many as the others, then those of `deal`. Tail::kPad fills an epoch's last step with the first samples of the
/// order, and Tail::kDrop leaves out what does not fill it. Copies of such a sampler share one place, so `cursor` of
/// the program's copy is also that of the loader's copy. The DataLoader must have no workers here: they would take
/// samples ahead of a step, before anybody knows which rank gets them.
///
///   tessera::RankSampler place(*data.size(), mesh, {.microbatches = 24, .batch = 8});
///   auto loader = torch::data::make_data_loader(data, place, /*batch_size=*/8);
///   for (auto& batch : *loader) {
///     engine.backward(loss_of(batch));
///     if (!engine.step_is_due()) continue;
///     engine.step();
///     place.deal(engine.microbatches());
///   }
///
/// Ranks never communicate: all make it with the same numbers. This header is not part of tessera/tessera.h, since
/// LibTorch's data headers are slow to compile.
class RankSampler : public torch::data::samplers::Sampler<> {
 public:
  /// Throws tessera::Error: 64 if there is no sample, or with Tail::kDrop fewer samples than ranks; 78 if only one of
  /// `microbatches` and `batch` was given, or fewer microbatches than ranks; 65 if the samples do not fill a step.
  RankSampler(std::size_t num_samples, const Mesh& mesh, const RankSamplerOptions& options = {});

  /// Begins the next epoch; the first call begins `options.epoch`. Right after `resume` or `load` the epoch goes on at
  /// the saved place instead, unless that was the epoch's end. `new_size`: another number of samples from now on, in a
  /// new epoch.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Returns indices of the next `batch_size` samples of this rank, or of what is left of the epoch; nothing at its
  /// end. Throws Error (64) for another number than RankSamplerOptions::batch, where that was given.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// From the next step on, this rank takes the microbatches of `run` (Engine::microbatches, with "deal" by speed). All
  /// ranks call it alike, after each step. Throws Error: 78 for a run that no step has, and within a step; 64 where
  /// samples of a later step were given already, and without RankSamplerOptions::microbatches.
  void deal(const MicrobatchRun& run);
  /// Returns the samples of the microbatch with this number among those of the step under way, whichever rank it is for
  /// (Engine::microbatch, with "deal.backups"), for a program that reads its data by itself. The step stays under way
  /// until `end_step`, which all ranks call after Engine::step, and the next epoch begins by itself. Throws Error: 78
  /// for a number that no step has, and within a step that `next` has begun; 64 without
  /// RankSamplerOptions::microbatches.
  std::vector<std::size_t> of(std::int64_t microbatch);
  void end_step();

  /// Returns the number of samples of this rank in the epoch that began last. It is the same on all ranks unless
  /// UnpaddedEpoch made the epoch, or microbatches are dealt; then it is that of an epoch in which this rank keeps its
  /// run.
  std::size_t size() const;
  /// Returns the current epoch, counted from 0.
  std::int64_t epoch() const;

  /// Returns the place behind everything that all ranks have taken, if each has taken as many samples as this one.
  /// CheckpointItems::data keeps it. The end of an epoch counts as the beginning of the next one.
  SamplerCursor cursor() const;
  /// Goes on at `cursor`, on any number of ranks. Throws Error (78) if the number of samples, the seed or shuffling
  /// differs.
  void resume(const SamplerCursor& cursor);

  /// Saves or loads the epoch and the place in it. A sampler that loads them gives the samples that would have come
  /// next, also if a DataLoader calls `reset` first. A sampler that loads must have the same numbers as the one that
  /// saved, or else it throws Error (64).
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void expect_enough() const;
  DealtSamples& dealt(const char* what) const;
  bool deals() const { return dealt_ && is_padded_; }
  /// Returns how many of `samples` neighbouring samples of the order this rank gets.
  std::size_t share_of(std::size_t samples) const;
  std::size_t left() const { return share_of(num_samples_ - begin_) - taken_; }
  void go_to(std::int64_t epoch, std::size_t begin, std::size_t taken);

  std::size_t num_samples_;
  std::size_t rank_, world_size_;
  RankSamplerOptions options_;
  std::int64_t epoch_;
  std::size_t begin_ = 0;                ///< samples of this epoch that all ranks had taken when `resume` was called
  std::size_t taken_ = 0;                ///< samples that this rank has taken in this epoch, behind `begin_`
  bool has_begun_ = false;               ///< whether the first epoch has begun
  bool goes_on_ = false;                 ///< whether nothing was taken since `resume` or `load`
  bool is_padded_ = true;                ///< whether this epoch is padded (Tail::kPad)
  std::shared_ptr<DealtSamples> dealt_;  ///< with `microbatches`: gives the samples of padded epochs
};

/// Gives LibTorch's DataLoader the samples of the steps that this worker takes, where workers come and go
/// ("sync.elastic"). Each step has samples of its own, `batches` batches of the loader, whichever worker makes the
/// step:
///
///   tessera::StepSampler sampler(*data.size(), engine.strategy().gradient_accumulation,
///                                [&] { return engine.take_step(1000); });
///   auto loader = torch::data::make_data_loader(data, sampler, batch_size);
///   while (!engine.steps_are_over()) {
///     for (auto& batch : *loader) {
///       engine.backward(loss_of(batch));
///       if (engine.step_is_due()) engine.step();
///     }
///   }
///
/// The loop around the loader is needed, since a loader that reads ahead takes steps ahead: an iteration ends where no
/// step is left but those that the loader has taken. A program trains on all batches of a loader, or ends: batches that
/// it leaves out belong to steps that no other worker gets. The last step of an epoch, if samples do not fill it, takes
/// samples from the order's beginning (Tail::kPad), or is left out (Tail::kDrop). All workers make it with the same
/// numbers; `options.epoch` has no effect.
class StepSampler : public torch::data::samplers::Sampler<> {
 public:
  using TakeStep = std::function<std::optional<std::int64_t>()>;

  /// Throws tessera::Error (64) if there is no sample or no batch.
  StepSampler(std::size_t num_samples, std::int64_t batches, TakeStep take, const RankSamplerOptions& options = {});

  /// Changes nothing but the number of samples, if one is given.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Returns indices of the next batch; it takes a new step if the one before is over. Returns nothing where `take`
  /// returns none. Throws Error (65) where an epoch has no whole step (Tail::kDrop).
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Save and load nothing: the servers know which steps are made.
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

 private:
  void expect_enough() const;

  std::size_t num_samples_;
  std::int64_t batches_;
  TakeStep take_;
  RankSamplerOptions options_;
  std::int64_t step_ = 0;                ///< the step under way
  std::int64_t given_ = 0;               ///< batches of the step that were given; 0: the step is over
  std::size_t batch_ = 0;                ///< samples of a batch of `dealt_`
  std::shared_ptr<DealtSamples> dealt_;  ///< gives the samples of steps; null before the first one
};

}  // namespace tessera
