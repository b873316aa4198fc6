#include "runtime/data/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "runtime/base/noise.h"
#include "runtime/base/seeded_fault.h"
#include "runtime/base/status.h"
#include "runtime/data/dataset_stats.h"

namespace tessera {
namespace {

constexpr std::int64_t kMostSamples = std::int64_t{1} << 60;

/// Returns a text that says which setting gives the number of a step's microbatches.
std::string source_of_step(const SamplerOptions& options) {
  return options.microbatches > 0 ? "the sampler's microbatches"
                                  : fmt::format("accumulation {} x {} ranks", options.accumulation, options.world_size);
}

absl::Status check(const SamplerOptions& options) {
  const auto refuse = [](const std::string& what) { return make_error(ExitCode::kConfig, "sampler: " + what); };
  if (options.batch < 1)
    return refuse(
        fmt::format("batch must be at least 1, got {}. [T0573] hint: it is how many samples a rank takes at a time",
                    options.batch));
  if (options.accumulation < 1)
    return refuse(
        fmt::format("accumulation must be at least 1, got {}. [T0574] hint: it is how many batches make a step",
                    options.accumulation));
  if (options.world_size < 1 || options.rank < 0 || options.rank >= options.world_size)
    return refuse(
        fmt::format("want 0 <= rank < world size, got rank {} of {}. [T0575] hint: give it the mesh's rank and size",
                    options.rank, options.world_size));
  if (options.num_samples > kMostSamples)
    return refuse(
        fmt::format("{} samples are too many. [T0576] hint: cut the data into several datasets", options.num_samples));
  // A global batch above 2^60 would overflow, so the comparison divides.
  if (options.batch > kMostSamples / options.world_size / options.accumulation)
    return refuse(fmt::format("batch {} x accumulation {} x {} ranks is too large. [T0577] hint: take a smaller batch",
                              options.batch, options.accumulation, options.world_size));
  if (options.microbatches != 0 &&
      (options.microbatches < options.world_size || options.microbatches > kMostSamples / options.batch))
    return refuse(fmt::format(
        "want 0 microbatches, or at least one for each of {} ranks, got {}. [T0950] hint: it is the strategy's "
        "deal.microbatches",
        options.world_size, options.microbatches));
  const bool too_few =
      options.tail == Tail::kDrop ? options.num_samples < options.global_batch() : options.num_samples < 1;
  if (too_few)
    return make_error(
        ExitCode::kCorruptData,
        fmt::format("the data hold {} sample(s), fewer than one step's {}, which are {} microbatches ({}) of {}. "
                    "[T0578] hint: take more data, a shorter sequence, a smaller batch or fewer microbatches",
                    options.num_samples, options.global_batch(), options.of_step(), source_of_step(options),
                    options.batch));
  return absl::OkStatus();
}

}  // namespace

std::int64_t num_windows(std::int64_t num_tokens, std::int64_t seq_len) {
  return num_tokens > seq_len && seq_len > 0 ? (num_tokens - 1) / seq_len : 0;
}

EpochOrder::EpochOrder(std::int64_t num_samples, std::uint64_t seed, bool shuffle, std::int64_t epoch)
    : num_samples_(num_samples),
      shuffle_(shuffle),
      shuffled_(static_cast<std::uint64_t>(num_samples), seed,
                seeded_fault(SeededFault::kEpochsAlike) ? 0 : static_cast<std::uint64_t>(epoch)) {}

std::int64_t EpochOrder::operator()(std::int64_t position) const {
  const std::int64_t wrapped = position % num_samples_;
  return shuffle_ ? static_cast<std::int64_t>(shuffled_(static_cast<std::uint64_t>(wrapped))) : wrapped;
}

absl::StatusOr<DistributedSampler> DistributedSampler::create(const SamplerOptions& options) {
  TESSERA_RETURN_IF_ERROR(check(options));
  return DistributedSampler(options);
}

DistributedSampler::DistributedSampler(const SamplerOptions& options)
    : options_(options), order_(options.num_samples, options.seed, options.shuffle, 0) {
  if (const std::int64_t all = options.microbatches; all > 0)
    dealt_ = {options.rank * all / options.world_size, (options.rank + 1) * all / options.world_size};
  start(0, 0);
}

void DistributedSampler::start(std::int64_t epoch, std::int64_t consumed) {
  order_ = EpochOrder(options_.num_samples, options_.seed, options_.shuffle, epoch);
  epoch_ = epoch;
  consumed_ = begin_ = consumed;
  taken_ = 0;
  const std::int64_t left = std::max<std::int64_t>(0, options_.num_samples - consumed);
  const std::int64_t step = options_.global_batch();
  const std::int64_t steps = options_.tail == Tail::kDrop ? left / step : left / step + (left % step != 0);
  end_ = consumed + steps * step;
}

bool DistributedSampler::next(std::span<std::int64_t> samples) {
  if (consumed_ >= end_) return false;
  write(next_position(), samples);
  if (dealt_ == MicrobatchRun()) {
    consumed_ += options_.batch * options_.world_size;
  } else if (++taken_ == dealt_.end - dealt_.begin) {
    taken_ = 0;
    consumed_ += options_.global_batch();
  }
  return true;
}

/// Writes the samples of a microbatch that begins at position `first`.
void DistributedSampler::write(std::int64_t first, std::span<std::int64_t> samples) {
  for (std::size_t i = 0; i < samples.size(); ++i) samples[i] = order_(first + static_cast<std::int64_t>(i));
  counted_ = std::clamp<std::int64_t>(options_.num_samples - first, 0, options_.batch);
}

absl::StatusOr<bool> DistributedSampler::take(std::int64_t microbatch, std::span<std::int64_t> samples) {
  const std::int64_t all = options_.of_step();
  if (microbatch < 0 || microbatch >= all)
    return make_error(ExitCode::kConfig,
                      fmt::format("sampler: microbatch {} was asked for, and a step has 0 to {} ({}). [T0951] hint: "
                                  "ask for what Engine::microbatch returns, with the strategy's gradient_accumulation "
                                  "as accumulation, or its deal.microbatches as microbatches",
                                  microbatch, all - 1, source_of_step(options_)));
  if (!is_between_steps())
    return make_error(ExitCode::kConfig,
                      "sampler: a microbatch was asked for by its number within a step whose samples come one after "
                      "the other. [T0952] hint: take all microbatches by their numbers, and end each step, or none");
  if (consumed_ >= end_) return false;
  write(consumed_ + microbatch * options_.batch, samples);
  return true;
}

void DistributedSampler::end_step() {
  if (consumed_ >= end_) start(epoch_ + 1, 0);
  consumed_ += options_.global_batch();
}

absl::Status DistributedSampler::deal(const MicrobatchRun& run) {
  const std::int64_t all = options_.of_step();
  if (run.begin < 0 || run.begin >= run.end || run.end > all)
    return make_error(
        ExitCode::kConfig,
        fmt::format("sampler: a run of the microbatches {} to {} was dealt, and a step has {} ({}). [T0924] hint: deal "
                    "what Engine::microbatches returns, with the strategy's gradient_accumulation as accumulation, or "
                    "its deal.microbatches as microbatches",
                    run.begin, run.end, all, source_of_step(options_)));
  if (!is_between_steps())
    return make_error(
        ExitCode::kConfig,
        "sampler: microbatches were dealt within a step. [T0925] hint: deal them when a step is over, before the "
        "next microbatch");
  dealt_ = run;
  return absl::OkStatus();
}

std::int64_t DistributedSampler::next_position() const {
  if (dealt_ != MicrobatchRun()) return consumed_ + (dealt_.begin + taken_) * options_.batch;
  if (!options_.runs) return consumed_ + options_.rank * options_.batch;
  const std::int64_t at_once = options_.batch * options_.world_size;
  const std::int64_t round = (consumed_ - begin_) / at_once % options_.accumulation;
  return consumed_ - round * at_once + (options_.rank * options_.accumulation + round) * options_.batch;
}

void DistributedSampler::set_epoch(std::int64_t epoch) { start(epoch, 0); }

absl::Status DistributedSampler::go_to_step(std::int64_t step) {
  if (step < 0)
    return make_error(
        ExitCode::kConfig,
        fmt::format("sampler: there is no step {}. [T1030] hint: steps count from 0, as Engine::take_step returns "
                    "them",
                    step));
  const std::int64_t steps = steps_per_epoch();
  start(step / steps, step % steps * options_.global_batch());
  return absl::OkStatus();
}

std::int64_t DistributedSampler::data_order(std::int64_t tokens, std::int64_t seq_len) const {
  std::uint64_t order = options_.seed;
  for (const std::int64_t part :
       {tokens, seq_len, options_.num_samples, options_.global_batch(), static_cast<std::int64_t>(options_.shuffle),
        static_cast<std::int64_t>(options_.tail)})
    order = mix_bits(order + 1) + static_cast<std::uint64_t>(part);
  return static_cast<std::int64_t>(mix_bits(order) >> 1);
}

std::int64_t DistributedSampler::steps_per_epoch() const {
  const std::int64_t step = options_.global_batch();
  return options_.num_samples / step + (options_.tail == Tail::kPad && options_.num_samples % step != 0);
}

std::int64_t DistributedSampler::padded_samples() const {
  return std::max<std::int64_t>(0, steps_per_epoch() * options_.global_batch() - options_.num_samples);
}

std::int64_t DistributedSampler::dropped_samples() const {
  return std::max<std::int64_t>(0, options_.num_samples - steps_per_epoch() * options_.global_batch());
}

SamplerCursor DistributedSampler::cursor() const {
  return {epoch_, consumed_, options_.num_samples, options_.seed, options_.shuffle};
}

absl::Status DistributedSampler::resume(const SamplerCursor& cursor) {
  const auto differs = [](const char* what, auto saved, auto now) {
    return make_error(ExitCode::kConfig,
                      fmt::format("the data order cannot be resumed: {} was {} and is {} now. [T0579] hint: use the "
                                  "same data, sequence length, shuffling and seed, or start anew",
                                  what, saved, now));
  };
  if (cursor.num_samples != options_.num_samples)
    return differs("the number of samples", cursor.num_samples, options_.num_samples);
  if (cursor.seed != options_.seed) return differs("the seed", cursor.seed, options_.seed);
  if (cursor.shuffle != options_.shuffle) return differs("shuffling", cursor.shuffle, options_.shuffle);
  if (cursor.epoch < 0 || cursor.consumed < 0 || cursor.consumed > kMostSamples * 2)
    return make_error(ExitCode::kCorruptData,
                      fmt::format("a data cursor of epoch {}, {} samples consumed makes no sense. [T0580] hint: it is "
                                  "of no checkpoint of this data; start anew",
                                  cursor.epoch, cursor.consumed));
  start(cursor.epoch, cursor.consumed);
  return absl::OkStatus();
}

absl::Status copy_windows(const TokenDataset& dataset, std::span<const std::int64_t> samples, std::int64_t seq_len,
                          std::span<std::int64_t> tokens, std::int64_t vocab_size) {
  const auto width = static_cast<std::size_t>(seq_len) + 1;
  if (seq_len < 1 || tokens.size() / width != samples.size() || tokens.size() % width != 0)
    return make_error(ExitCode::kInternal, fmt::format("copy_windows: {} samples of {} + 1 tokens into a buffer of {}",
                                                       samples.size(), seq_len, tokens.size()));
  for (std::size_t s = 0; s < samples.size(); ++s) {
    const auto window = tokens.subspan(s * width, width);
    if (samples[s] < 0 || samples[s] >= num_windows(dataset.num_tokens(), seq_len))
      return make_error(ExitCode::kInternal,
                        fmt::format("copy_windows: no sample {} among the {} of {}", samples[s],
                                    num_windows(dataset.num_tokens(), seq_len), dataset.describe()));
    TESSERA_RETURN_IF_ERROR(dataset.copy(samples[s] * seq_len, window));
    if (vocab_size > 0) TESSERA_RETURN_IF_ERROR(check_tokens(dataset, samples[s] * seq_len, window, vocab_size));
  }
  return absl::OkStatus();
}

}  // namespace tessera
