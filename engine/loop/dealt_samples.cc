#include "engine/loop/dealt_samples.h"

#include <utility>

#include "runtime/border/expect.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

DistributedSampler made(const SamplerOptions& options) {
  if (options.microbatches < 1)
    throw Error(ExitCode::kConfig,
                c10::str("RankSampler deals a step's microbatches out, and was given ", options.microbatches,
                         ". [T1015] hint: give it those of all ranks: gradient_accumulation times ranks, or "
                         "deal.microbatches"));
  return value_or_throw(DistributedSampler::create(options));
}

}  // namespace

DealtSamples::DealtSamples(const SamplerOptions& options, std::int64_t epoch)
    : options_(options), sampler_(made(options)), samples_(static_cast<std::size_t>(options.batch)) {
  sampler_.set_epoch(epoch);
}

void DealtSamples::begin_epoch() {
  const bool goes_on = std::exchange(goes_on_, false) && !sampler_.is_over();
  if (!sampler_.is_over()) steps_given_ = 0;  // a loop that leaves an epoch early may have taken a microbatch too many
  if (std::exchange(has_begun_, true) && !goes_on) sampler_.set_epoch(epoch() + 1);
}

/// Notes that samples of this epoch were given, so that the next `begin_epoch` begins another epoch.
void DealtSamples::take_place() {
  has_begun_ = true;
  goes_on_ = false;
}

std::optional<DealtSamples::Samples> DealtSamples::next() {
  take_place();
  if (!sampler_.next(samples_)) return std::nullopt;
  if (sampler_.is_between_steps()) ++steps_given_;
  return Samples(samples_.begin(), samples_.end());
}

DealtSamples::Samples DealtSamples::of(std::int64_t microbatch) {
  take_place();
  if (!value_or_throw(sampler_.take(microbatch, samples_))) {
    sampler_.set_epoch(epoch() + 1);
    TORCH_INTERNAL_ASSERT(value_or_throw(sampler_.take(microbatch, samples_)), "an epoch has no sample");
  }
  return Samples(samples_.begin(), samples_.end());
}

void DealtSamples::go_to_step(std::int64_t step) { throw_if_error(sampler_.go_to_step(step)); }

void DealtSamples::deal(const MicrobatchRun& run) {
  expect(steps_given_ <= 1 && (steps_given_ == 0 || sampler_.is_between_steps()),
         "RankSampler: samples of a later step were given before anybody knew whose they are. [T1016] hint: deal "
         "behind each Engine::step, and make the DataLoader without workers, which take samples ahead of the step; "
         "what is to be read ahead, take by its number (RankSampler::of)");
  throw_if_error(sampler_.deal(run));
  steps_given_ = 0;
}

void DealtSamples::resize(std::int64_t num_samples) {
  options_.num_samples = num_samples;
  const std::int64_t epoch_before = epoch();
  const MicrobatchRun run = sampler_.run();
  sampler_ = made(options_);
  sampler_.set_epoch(epoch_before);
  throw_if_error(sampler_.deal(run));
  goes_on_ = false;
}

std::int64_t DealtSamples::microbatches_per_epoch() const {
  return steps_per_epoch() * (sampler_.run().end - sampler_.run().begin);
}

SamplerCursor DealtSamples::cursor() const {
  SamplerCursor cursor = sampler_.cursor();
  if (sampler_.is_over()) {
    ++cursor.epoch;
    cursor.consumed = 0;
  }
  return cursor;
}

void DealtSamples::resume(const SamplerCursor& cursor) {
  throw_if_error(sampler_.resume(cursor));
  has_begun_ = goes_on_ = true;
  steps_given_ = 0;
}

}  // namespace tessera
