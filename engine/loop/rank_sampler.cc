#include "tessera/rank_sampler.h"

#include <c10/util/StringUtil.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <utility>

#include "engine/loop/dealt_samples.h"
#include "runtime/base/noise.h"
#include "runtime/border/expect.h"
#include "runtime/data/sampler.h"
#include "tessera/error.h"
#include "tessera/seed_for_rank.h"
#include "tessera/unpadded_epoch.h"

namespace tessera {

std::uint64_t seed_for_rank(std::uint64_t seed, int rank) { return mix_bits(seed) + static_cast<std::uint64_t>(rank); }

RankSampler::RankSampler(std::size_t num_samples, const Mesh& mesh, const RankSamplerOptions& options)
    : num_samples_(num_samples),
      rank_(static_cast<std::size_t>(mesh.rank())),
      world_size_(static_cast<std::size_t>(mesh.world_size())),
      options_(options),
      epoch_(options.epoch) {
  expect_enough();
  if (options.microbatches == 0 && options.batch == 0) return;
  const SamplerOptions sampling{.num_samples = static_cast<std::int64_t>(num_samples),
                                .batch = options.batch,
                                .rank = mesh.rank(),
                                .world_size = mesh.world_size(),
                                .seed = options.seed,
                                .shuffle = options.shuffle,
                                .tail = options.tail,
                                .microbatches = options.microbatches};
  dealt_ = std::make_shared<DealtSamples>(sampling, options.epoch);
}

DealtSamples& RankSampler::dealt(const char* what) const {
  expect(
      dealt_ != nullptr, what,
      " of a sampler that deals samples one by one. [T1017] hint: give it microbatches and batch (RankSamplerOptions)");
  return *dealt_;
}

void RankSampler::deal(const MicrobatchRun& run) { dealt("RankSampler::deal").deal(run); }
std::vector<std::size_t> RankSampler::of(std::int64_t microbatch) { return dealt("RankSampler::of").of(microbatch); }
void RankSampler::end_step() { dealt("RankSampler::end_step").end_step(); }

void RankSampler::expect_enough() const {
  const std::size_t wanted = options_.tail == Tail::kDrop ? world_size_ : 1;
  expect(num_samples_ >= wanted, "RankSampler wants ", wanted, " samples or more for ", world_size_, " ranks, got ",
         num_samples_, ". [T0197] hint: take more samples, or fewer ranks");
}

std::size_t RankSampler::share_of(std::size_t samples) const {
  const std::size_t whole = samples / world_size_, rest = samples % world_size_;
  if (options_.tail == Tail::kDrop || rest == 0) return whole;
  return is_padded_ || rank_ < rest ? whole + 1 : whole;
}

std::size_t RankSampler::size() const {
  return deals() ? static_cast<std::size_t>(dealt_->microbatches_per_epoch() * options_.batch) : share_of(num_samples_);
}

std::int64_t RankSampler::epoch() const { return dealt_ ? dealt_->epoch() : epoch_; }

void RankSampler::reset(std::optional<std::size_t> new_size) {
  is_padded_ = !UnpaddedEpoch::lives();
  if (new_size) {
    num_samples_ = *new_size;
    expect_enough();
    if (dealt_) dealt_->resize(static_cast<std::int64_t>(num_samples_));
  }
  if (deals()) return dealt_->begin_epoch();
  const bool goes_on = std::exchange(goes_on_, false) && !new_size && left() > 0;
  if (goes_on) return;
  if (has_begun_) ++epoch_;
  has_begun_ = true;
  begin_ = taken_ = 0;
}

std::optional<std::vector<std::size_t>> RankSampler::next(std::size_t batch_size) {
  if (deals()) {
    expect(static_cast<std::int64_t>(batch_size) == options_.batch, "RankSampler deals microbatches of ",
           options_.batch, " samples, and was asked for ", batch_size,
           ". [T1018] hint: give the DataLoader that batch size (RankSamplerOptions::batch)");
    return dealt_->next();
  }
  has_begun_ = true;
  goes_on_ = false;
  const std::size_t count = std::min(batch_size, left());
  if (count == 0) return std::nullopt;
  const EpochOrder order(static_cast<std::int64_t>(num_samples_), options_.seed, options_.shuffle, epoch_);
  std::vector<std::size_t> samples(count);
  for (std::size_t& sample : samples)
    sample = static_cast<std::size_t>(order(static_cast<std::int64_t>(begin_ + taken_++ * world_size_ + rank_)));
  return samples;
}

SamplerCursor RankSampler::cursor() const {
  if (dealt_) return dealt_->cursor();
  const bool is_over = left() == 0;
  const std::size_t consumed = is_over ? 0 : begin_ + taken_ * world_size_;
  return {is_over ? epoch_ + 1 : epoch_, static_cast<std::int64_t>(consumed), static_cast<std::int64_t>(num_samples_),
          options_.seed, options_.shuffle};
}

void RankSampler::resume(const SamplerCursor& cursor) {
  if (dealt_) return dealt_->resume(cursor);
  const auto expect_same = [](const char* what, auto was, auto is) {
    if (was == is) return;
    throw Error(ExitCode::kConfig,
                c10::str("RankSampler::resume: ", what, " was ", was, " and is ", is,
                         " now. [T0198] hint: give the sampler the numbers of the run that was saved"));
  };
  expect_same("the number of samples", cursor.num_samples, static_cast<std::int64_t>(num_samples_));
  expect_same("the seed", cursor.seed, options_.seed);
  expect_same("shuffling", cursor.shuffle, options_.shuffle);
  expect(cursor.epoch >= 0 && cursor.consumed >= 0, "RankSampler::resume: epoch ", cursor.epoch, " and ",
         cursor.consumed, " samples taken are no place. [T0199] hint: give an epoch and samples of 0 or more");
  go_to(cursor.epoch, std::min(static_cast<std::size_t>(cursor.consumed), num_samples_), 0);
}

void RankSampler::go_to(std::int64_t epoch, std::size_t begin, std::size_t taken) {
  epoch_ = epoch;
  begin_ = begin;
  taken_ = taken;
  has_begun_ = goes_on_ = true;
}

void RankSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("samples", c10::IValue(static_cast<std::int64_t>(num_samples_)));
  archive.write("ranks", c10::IValue(static_cast<std::int64_t>(world_size_)));
  const SamplerCursor place =
      dealt_ ? cursor() : SamplerCursor{.epoch = epoch_, .consumed = static_cast<std::int64_t>(begin_)};
  archive.write("epoch", c10::IValue(place.epoch));
  archive.write("taken", c10::IValue(static_cast<std::int64_t>(dealt_ ? 0 : taken_)));
  archive.write("begin", c10::IValue(place.consumed));
}

void RankSampler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* key) {
    c10::IValue value;
    archive.read(key, value);
    return value.toInt();
  };
  const std::int64_t samples = read("samples"), ranks = read("ranks");
  expect(samples == static_cast<std::int64_t>(num_samples_) && ranks == static_cast<std::int64_t>(world_size_),
         "RankSampler: the archive is of ", samples, " samples on ", ranks, " ranks, here are ", num_samples_, " on ",
         world_size_, ". [T0200] hint: an archive goes on with the same dataset on as many ranks");
  c10::IValue begin(std::int64_t{0});
  archive.try_read("begin", begin);  // version 0.1 did not write "begin"
  const std::int64_t epoch = read("epoch"), taken = read("taken");
  const auto behind = static_cast<std::size_t>(begin.toInt());
  expect(epoch >= 0 && taken >= 0 && begin.toInt() >= 0 && behind <= num_samples_ &&
             static_cast<std::size_t>(taken) <= share_of(num_samples_ - behind),
         "RankSampler: the archive's place, epoch ", epoch, " and ", taken,
         " samples taken, is none of this epoch. [T0201] hint: it was cut short; begin the epoch anew");
  // A sampler that deals samples one by one may have written the archive.
  if (dealt_) return dealt_->resume({epoch, begin.toInt() + taken * ranks, samples, options_.seed, options_.shuffle});
  go_to(epoch, behind, static_cast<std::size_t>(taken));
}

StepSampler::StepSampler(std::size_t num_samples, std::int64_t batches, TakeStep take,
                         const RankSamplerOptions& options)
    : num_samples_(num_samples), batches_(batches), take_(std::move(take)), options_(options) {
  expect_enough();
}

void StepSampler::expect_enough() const {
  expect(num_samples_ > 0 && batches_ > 0, "StepSampler wants a sample or more, and a batch or more a step, got ",
         num_samples_, " and ", batches_,
         ". [T1019] hint: give it the data's size and the strategy's gradient_accumulation");
}

void StepSampler::reset(std::optional<std::size_t> new_size) {
  if (!new_size) return;
  num_samples_ = *new_size;
  dealt_.reset();
  expect_enough();
}

std::optional<std::vector<std::size_t>> StepSampler::next(std::size_t batch_size) {
  if (!dealt_ || batch_ != batch_size) {
    batch_ = batch_size;
    const SamplerOptions sampling{.num_samples = static_cast<std::int64_t>(num_samples_),
                                  .batch = static_cast<std::int64_t>(batch_size),
                                  .rank = 0,
                                  .world_size = 1,
                                  .seed = options_.seed,
                                  .shuffle = options_.shuffle,
                                  .tail = options_.tail,
                                  .microbatches = batches_};
    dealt_ = std::make_shared<DealtSamples>(sampling, /*epoch=*/0);
  }
  if (given_ == 0) {
    const std::optional<std::int64_t> taken = take_();
    if (!taken) return std::nullopt;
    step_ = *taken;
  }
  dealt_->go_to_step(step_);
  const std::int64_t batch = std::exchange(given_, (given_ + 1) % batches_);
  return dealt_->of(batch);
}

}  // namespace tessera
