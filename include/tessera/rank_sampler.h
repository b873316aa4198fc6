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

/// The options for the order in which a RankSampler deals samples.
struct RankSamplerOptions {
  std::uint64_t seed = 0;  ///< seed of the shuffle; the same on all ranks
  bool shuffle = true;     ///< false: samples come in the order of the dataset
  Tail tail = Tail::kPad;  ///< what happens to the last samples of an epoch if there is not one for every rank
  std::int64_t epoch = 0;  ///< epoch that the first `reset` begins; a job that continues gives the epoch in which it
                           ///< stopped
  /// Above 0: whole microbatches are dealt. The number is that of all ranks' microbatches in a step:
  /// gradient_accumulation times ranks, or "deal.microbatches". Strategy::reproducible and "deal" by speed need it.
  std::int64_t microbatches = 0;
  std::int64_t batch = 0;  ///< with `microbatches`: samples of a microbatch, which must be the batch size of the
                           ///< DataLoader
};

/// Deals the samples of a dataset to the ranks, for LibTorch's DataLoader. The DataLoader calls the sampler on the
/// thread that iterates:
///
///   auto data = MyDataset(...).map(torch::data::transforms::Stack<>());
///   auto loader = torch::data::make_data_loader(data, tessera::RankSampler(*data.size(), mesh), /*batch_size=*/32);
///   for (int epoch = 0; epoch < epochs; ++epoch)
///     for (auto& batch : *loader) ...                 // this rank's share, in another order each epoch
///
/// The sampler keeps these rules of PyTorch's DistributedSampler:
/// 1. Every sample of an epoch is given to exactly one rank, with fewer exceptions than there are ranks. Tail::kPad
///    gives the first samples of the order twice (more often if there are fewer samples than ranks). Tail::kDrop leaves
///    the last samples out.
/// 2. Every rank gets the same number of samples, and therefore of batches; the last batches have the same size.
///    Engine::evaluate and tessera::uneven allow different numbers of samples on the ranks. There, Tail::kPad gives no
///    sample twice, and some ranks get one sample less.
/// 3. The order depends only on the number of samples, the seed and the epoch. Sample number p of the order belongs to
///    rank p mod world_size.
///
/// A program need not call set_epoch. The DataLoader calls `reset` when an iteration begins, and each `reset` begins
/// the next epoch; the first call begins `options.epoch`. (LibTorch's DistributedRandomSampler gives every epoch the
/// same order, since a program cannot call its set_epoch inside a DataLoader.)
///
/// A program that saves in the middle of an epoch keeps a second sampler. It takes as many samples from this sampler as
/// the training loop takes from the loader. The loader's own sampler runs ahead, and cannot be reached.
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
/// If RankSamplerOptions::microbatches is above 0, the sampler deals whole microbatches instead of samples. The samples
/// of a microbatch then depend neither on the number of ranks nor on the rank that computes it. Microbatch m of an
/// epoch's step k has the `batch` samples of the order that begin with number (k * microbatches + m) * batch. A rank
/// takes neighbouring microbatches. At first all ranks take equally many microbatches; if the number of ranks does not
/// divide `microbatches`, some ranks take one more. A rank that has called `deal` takes the microbatches of its run.
/// Tail::kPad fills the last step of an epoch with the first samples of the order. Tail::kDrop leaves out samples that
/// do not fill a step. Copies of such a sampler share one position, so `cursor` of the program's copy is also that of
/// the loader's copy. The DataLoader must not have workers here: they would take samples before it is known which rank
/// gets them.
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
/// Ranks do not communicate, so all ranks must make the sampler with the same numbers. This header is not part of
/// tessera/tessera.h, since LibTorch's data headers are slow to compile.
class RankSampler : public torch::data::samplers::Sampler<> {
 public:
  /// Throws tessera::Error: 64 if there is no sample or, with Tail::kDrop, if there are fewer samples than ranks; 78 if
  /// only one of `microbatches` and `batch` was given, or if there are fewer microbatches than ranks; 65 if the samples
  /// do not fill a step (Tail::kDrop with `microbatches`).
  RankSampler(std::size_t num_samples, const Mesh& mesh, const RankSamplerOptions& options = {});

  /// Begins the next epoch; the first call begins `options.epoch`. Right after `resume` or `load` it instead continues
  /// the epoch at the saved position, unless that is the end of the epoch. `new_size`: the number of samples from now
  /// on; a new epoch then begins.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Returns the indices of the next `batch_size` samples of this rank, or fewer if the epoch has fewer left; nothing
  /// at the end of the epoch. Throws Error (64) if RankSamplerOptions::batch was given and `batch_size` differs from
  /// it.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Makes this rank take the microbatches of `run` from the next step on (Engine::microbatches, with "deal" by speed).
  /// All ranks call it after each step. Throws Error: 78 for a run that is empty or not within the microbatches of a
  /// step, or for a call in the middle of a step; 64 if samples of a later step were already given, or if
  /// RankSamplerOptions::microbatches was not given.
  void deal(const MicrobatchRun& run);
  /// Returns the samples of microbatch number `microbatch` of the step under way. The microbatch may belong to any rank
  /// (Engine::microbatch, with "deal.backups"). The function is for a program that reads its data by itself. The step
  /// stays under way until `end_step`, which all ranks call after Engine::step. The next epoch begins automatically.
  /// Throws Error: 78 if a step has no such microbatch, or if `next` has begun the step; 64 without
  /// RankSamplerOptions::microbatches.
  std::vector<std::size_t> of(std::int64_t microbatch);
  /// Ends the step whose samples `of` returned. All ranks call it after Engine::step.
  void end_step();

  /// Returns the number of samples of this rank in the epoch that began last. It is the same on all ranks, unless the
  /// epoch began under an UnpaddedEpoch, or microbatches are dealt. If microbatches are dealt, it is the number for an
  /// epoch in which this rank keeps its run.
  std::size_t size() const;
  /// Returns the current epoch, counted from 0.
  std::int64_t epoch() const;

  /// Returns the position behind all samples that the ranks have taken, assuming that each rank has taken as many as
  /// this one. CheckpointItems::data keeps it. The end of an epoch counts as the beginning of the next epoch.
  SamplerCursor cursor() const;
  /// Continues at `cursor`, on any number of ranks. Throws Error (78) if the number of samples, the seed or shuffling
  /// differs.
  void resume(const SamplerCursor& cursor);

  /// `save` and `load` keep the epoch and the position in the epoch. After a load the sampler gives the samples that
  /// would have come next, also if a DataLoader calls `reset` first. Throws Error (64) if the sampler that loads has
  /// another number of samples or of ranks than the sampler that saved.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Reads the data that `save` wrote.
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void expect_enough() const;
  DealtSamples& dealt(const char* what) const;
  bool deals() const { return dealt_ && is_padded_; }
  /// Returns the number of samples that this rank gets out of `samples` neighbouring samples of the order.
  std::size_t share_of(std::size_t samples) const;
  std::size_t left() const { return share_of(num_samples_ - begin_) - taken_; }
  void go_to(std::int64_t epoch, std::size_t begin, std::size_t taken);

  std::size_t num_samples_;
  std::size_t rank_, world_size_;
  RankSamplerOptions options_;
  std::int64_t epoch_;
  std::size_t begin_ = 0;                ///< samples of this epoch that all ranks had taken when `resume` was called
  std::size_t taken_ = 0;                ///< samples that this rank has taken in this epoch after `begin_`
  bool has_begun_ = false;               ///< whether the first epoch has begun
  bool goes_on_ = false;                 ///< whether no sample was taken since `resume` or `load`
  bool is_padded_ = true;                ///< whether this epoch is padded (Tail::kPad)
  std::shared_ptr<DealtSamples> dealt_;  ///< with `microbatches`: gives the samples of padded epochs
};

/// Gives LibTorch's DataLoader the samples of the steps that this worker takes, if workers may join and leave
/// ("sync.elastic"). Each step has its own samples, which fill `batches` batches of the loader, whichever worker makes
/// the step:
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
/// The outer loop is needed, since a loader that reads ahead also takes steps ahead. An iteration over the loader ends
/// when no step is left except those that the loader has taken. A program must train on all batches of a loader, since
/// no other worker gets the steps of batches that it leaves out. If samples do not fill the last step of an epoch, the
/// step takes samples from the beginning of the order (Tail::kPad), or is left out (Tail::kDrop). All workers must make
/// the sampler with the same numbers. The servers check this if the program gives take_step a `data_order` that is
/// computed from these numbers. `options.epoch` has no effect.
class StepSampler : public torch::data::samplers::Sampler<> {
 public:
  /// A function that returns the number of the next step for this worker, or nothing at the end (Engine::take_step).
  using TakeStep = std::function<std::optional<std::int64_t>()>;

  /// Throws tessera::Error (64) if there is no sample or no batch.
  StepSampler(std::size_t num_samples, std::int64_t batches, TakeStep take, const RankSamplerOptions& options = {});

  /// Changes the number of samples, if `new_size` is given, and nothing else.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// Returns the indices of the next batch; if all batches of the step under way were given, it takes a new step first.
  /// Returns nothing if `take` returns nothing. Throws Error (65) if an epoch has no whole step (Tail::kDrop).
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Does nothing, because the parameter servers record which steps are made.
  void save(torch::serialize::OutputArchive&) const override {}
  /// Does nothing.
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
