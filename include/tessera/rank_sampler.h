#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/token_options.h"

namespace tessera {

struct RankSamplerOptions {
  std::uint64_t seed = 0;  ///< the same on all ranks
  bool shuffle = true;     ///< false: in the order of the dataset
  Tail tail = Tail::kPad;  ///< of the samples that do not fill a round of one a rank
  std::int64_t epoch = 0;  ///< that the first `reset` begins: where a job that goes on has stopped
};

/// Deals the samples of a dataset out to the ranks, for LibTorch's DataLoader:
///
///   auto data = MyDataset(...).map(torch::data::transforms::Stack<>());
///   auto loader = torch::data::make_data_loader(data, tessera::RankSampler(*data.size(), mesh), /*batch_size=*/32);
///   for (int epoch = 0; epoch < epochs; ++epoch)
///     for (auto& batch : *loader) ...                 // this rank's share, in another order each epoch
///
/// As PyTorch's DistributedSampler:
///  1. In an epoch every sample is given to exactly one rank, but for the first few of the order, which Tail::kPad gives
///     twice (more often where there are fewer samples than ranks), or the last few of the order, which Tail::kDrop leaves
///     out: fewer than there are ranks.
///  2. Every rank gets the same number of samples, so also of batches, and its last batch is as large as the others' last. But in
///     Engine::evaluate and tessera::uneven, which go on where ranks differ, Tail::kPad gives no sample twice, and some ranks get one less.
///  3. The order depends on the number of samples, seed and epoch only. Sample number p of it is rank p mod world_size's.
/// Unlike there, nobody has to say set_epoch: each `reset`, which the DataLoader makes when an iteration begins, begins the
/// next epoch, and the first one `options.epoch`. (LibTorch's own DistributedRandomSampler gives every epoch one order,
/// since it cannot be reached inside a DataLoader.)
///
/// A program that saves in the middle of an epoch has a second sampler that takes what the training loop takes: the loader's own has gone
/// ahead, and cannot be reached.
///
///   tessera::RankSampler place(*data.size(), mesh);
///   if (resumed) place.resume(*loaded.items.data);
///   auto loader = torch::data::make_data_loader(data, place, batch_size);   // a copy
///   while (place.epoch() < epochs) {
///     for (auto& batch : *loader) {                                         // the first time: what was left of the epoch
///       ...
///       place.next(batch_size);
///       tessera::save_checkpoint(engine, folder, {.data = place.cursor()});
///     }
///     place.reset();
///   }
///
/// Ranks never talk: all make it with the same numbers. This header is not part of tessera/tessera.h, since LibTorch's data
/// headers are slow to compile.
class RankSampler : public torch::data::samplers::Sampler<> {
 public:
  /// Throws tessera::Error (64) where there is no sample, or with Tail::kDrop not one a rank.
  RankSampler(std::size_t num_samples, const Mesh& mesh, const RankSamplerOptions& options = {});

  /// Begins the next epoch; the first call begins `options.epoch`. Right after `resume` or `load` it begins nothing: the epoch goes on at
  /// the place that was saved, unless that was its end. `new_size`: another number of samples from now on, in a new epoch.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;
  /// The next `batch_size` samples of this rank, or what is left of the epoch; nothing at its end.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;

  /// Samples that this rank gets in the epoch that began last, the same number on all ranks unless UnpaddedEpoch made it.
  std::size_t size() const;
  std::int64_t epoch() const { return epoch_; }

  /// The place behind what all ranks have taken, if each has taken as many samples as this one; CheckpointItems::data keeps it. At the end of
  /// an epoch it is the beginning of the next one.
  SamplerCursor cursor() const;
  /// Goes on there, on any number of ranks. Throws Error (78) if the number of samples, the seed or shuffling is another.
  void resume(const SamplerCursor& cursor);

  /// Epoch and place in it. A sampler that loads them gives what would have come next, also where a DataLoader takes it (`reset`), provided that
  /// its numbers are the same; Error (64) if they are not.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void expect_enough() const;
  /// How many this rank gets of so many samples that follow each other in the order.
  std::size_t share_of(std::size_t samples) const;
  std::size_t left() const { return share_of(num_samples_ - begin_) - taken_; }
  void go_to(std::int64_t epoch, std::size_t begin, std::size_t taken);

  std::size_t num_samples_;
  std::size_t rank_, world_size_;
  RankSamplerOptions options_;
  std::int64_t epoch_;
  std::size_t begin_ = 0;   ///< samples of this epoch that all ranks had taken when `resume` came
  std::size_t taken_ = 0;   ///< by this rank in this epoch, behind them
  bool has_begun_ = false;  ///< the first epoch
  bool goes_on_ = false;    ///< nothing was taken since `resume` or `load`
  bool is_padded_ = true;   ///< this epoch, with Tail::kPad
};

}  // namespace tessera
