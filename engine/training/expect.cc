#include "runtime/border/expect.h"

#include <cmath>
#include <utility>
#include <variant>

#include "engine/loop/divided_loss.h"
#include "engine/training/training.h"
#include "runtime/base/log.h"
#include "runtime/border/phrase.h"

namespace tessera {
namespace {

/// Returns whether gradients are combined by votes. Each rank then has one vote, whatever the weight of its loss.
bool ranks_vote(const Strategy& strategy) {
  return std::holds_alternative<SignMajorityConfig>(strategy.compression.method);
}

}  // namespace

void Training::expect_parameters(bool may_unfreeze) {
  if (values.open_writes > 0) return;
  if (gathering.publication) gathering.publication->finish();
  if (gathering.residency) gathering.residency->expect_values();
  values.checks->expect_accepted(may_unfreeze);
}

void Training::expect_backward(const char* what) const {
  expect(
      !values.half_loaded, what,
      " after a load failed half-way: some parameters are loaded, others are not. [T0115] hint: load a checkpoint that "
      "is whole, or make the Engine anew");
  expect(!step_is_due(), what, " was called ", window.microbatch + 1, " times in a step, but ",
         dealer ? "this rank's microbatches are " : "gradient_accumulation is ", microbatches(),
         ". [T0116] hint: call step() first");
  expect(
      job.strategy.lr_schedule.warmup_epochs == 0 || job.strategy.lr_schedule.epoch_samples > 0, what,
      " with lr_schedule.warmup_epochs, whose length is not known. [T0903] hint: call set_epoch_samples first, or set "
      "lr_schedule.epoch_samples");
  expect_weights(what);
  expect(values.open_writes == 0, what, " under ", phrases::kWriteGuard,
         ". [T0117] hint: close that guard first, so that all ranks train the same values");
  expect(!updates_in_backward() || values.open_guards == 0, what,
         " under Gathered with optimizer.in_backward. [T0118] hint: close that guard first, since backward changes "
         "what it shows");
}

void Training::expect_microbatch(const at::Tensor& loss, const MicrobatchInfo& info) const {
  expect_backward("backward");
  expect(!updates_in_backward() || !info.retain_graph,
         "backward with retain_graph: several losses a microbatch do not go with optimizer.in_backward, which updates "
         "parameters with the gradients of the first. [T0119] hint: add the losses up before one backward, or set "
         "\"optimizer\": {\"in_backward\": false}");
  expect(!info.retain_graph || !job.strategy.reproducible || plan.keeps_gradients(),
         "backward with retain_graph under \"reproducible\": ranks would sum the gradients of each loss by itself, and "
         "one rank sums those of a microbatch. [T0814] hint: add the losses up before one backward, or set "
         "gradient_sync to \"last_microbatch\"");
  expect(!claims || !info.retain_graph,
         "backward with retain_graph under deal.backups: several losses a microbatch do not go with microbatches that "
         "other ranks may make at the same time. [T0943] hint: add the losses up before one backward, or leave "
         "deal.backups out");
  expect(
      !claims || window.asked == claims->next(),
      "backward under deal.backups, and the program has not asked which microbatch of the step this is: it may be "
      "another rank's. [T0944] hint: before each forward take the samples of Engine::microbatch(), as TokenBatches::of "
      "does, or leave deal.backups out");
  expect(loss.defined(),
         "backward wants a scalar loss, got an undefined tensor. [T0734] hint: pass the loss that forward returned");
  expect(loss.numel() == 1, "backward wants a scalar loss, got a tensor of sizes ", loss.sizes(),
         ". [T0120] hint: take .mean() of the losses of a microbatch");
  expect(loss.is_floating_point(), "backward wants a floating loss, got ", loss.scalar_type(),
         ". [T0121] hint: counts and comparisons have no gradients; take a mean of floating values");
  expect(loss.requires_grad(),
         "backward wants a loss that depends on a parameter that trains; this one requires no "
         "gradients. [T0122] hint: compute it outside of ",
         phrases::kNoGrad, ", and do not detach it");
  expect(loss.device() == job.accelerator.device.device, "backward wants a loss on ", job.accelerator.device.device,
         ", got one on ", loss.device(), ". [T0123] hint: move the module's inputs there");
  expect_weight(info);
  const LrScheduleConfig& schedule = job.strategy.lr_schedule;
  const bool has_samples = info.samples > 0 || info.weight == 0 || info.retain_graph;  // the samples are given with the
                                                                                       // last loss
  expect(schedule.base_batch_size == 0 || has_samples,
         "lr_schedule.base_batch_size needs the number of samples. [T0124] hint: pass ", phrases::kSamples,
         " to backward");
  const bool counts_samples = schedule.warmup_samples > 0 || schedule.warmup_epochs > 0;
  expect(!counts_samples || has_samples,
         "lr_schedule.warmup_samples and warmup_epochs need the number of samples. [T0904] hint: pass ",
         phrases::kSamples, " to backward");
}

void Training::expect_weight(const MicrobatchInfo& info) const {
  expect(std::isfinite(info.weight) && info.weight >= 0,
         "backward wants a weight that is finite and not negative, got ", info.weight,
         ". [T0125] hint: give the number of tokens, pixels or samples that the loss is a mean over");
  expect(window.weight.value_or(info.weight) == info.weight, "backward was told weight ", info.weight,
         ", but an earlier loss of this microbatch (retain_graph) came with weight ", window.weight.value_or(0),
         ". [T0126] hint: give all losses of a microbatch one weight; multiply a loss by a factor of its own");
  expect(info.weight == 1 || !ranks_vote(job.strategy), "backward was told weight ", info.weight,
         ", but under compression.method \"sign_majority\" each rank has one vote, whatever its loss is a mean over. "
         "[T0127] hint: leave the weight out, or take another compression.method");
}

void Training::expect_weights(const char* what) const {
  expect(!values.are_averages, what, " under ", phrases::kAverages,
         ". [T0128] hint: close that guard first, since parameters are averages there");
}

void Training::expect_not_updated(const char* what) const {
  expect(!updates_in_backward() || window.microbatch == 0, what,
         " between backward and step with optimizer.in_backward: backward has updated parameters already. [T0129] "
         "hint: call step() first");
}

void Training::expect_nothing() const {
  expect_backward("backward_nothing");
  expect(!claims, "backward_nothing, or ", phrases::kPartialStep,
         ", under deal.backups: each microbatch of the step has data there, and some rank makes it. [T0945] hint: take "
         "data that fill each step (TokenBatches), or leave deal.backups out");
  expect(!window.weight,
         "backward_nothing in the middle of a microbatch that has more losses (retain_graph). [T0130] hint: end it "
         "with a backward that says retain_graph false");
  expect(!ranks_vote(job.strategy), "backward_nothing, or ", phrases::kPartialStep,
         ", under compression.method \"sign_majority\": a rank without a batch has a vote all the same. [T0131] hint: "
         "give every rank as many batches, or take another compression.method");
  expect(window.meeting || !window.rounds.last().empty() || !gathers_with_others(),
         "backward_nothing before this rank's first microbatch under this plan: it does not know yet in which order "
         "ranks gather units. [T0132] hint: loop over uneven(loader, engine) on all ranks, where those with a batch "
         "tell it; or run forward and backward of any batch, with weight 0 if it must not count");
  // The other ranks gather each unit's values from all ranks of the replica in a step's first forward (ServedShards).
  expect(sync.config().asynchronous.replica_ranks == 1 || window.microbatch > 0,
         "backward_nothing before a step's first microbatch, where several ranks are one replica (sync.replica_ranks): "
         "the others wait for the values that this rank would pull. [T1063] hint: give the ranks of a replica as many "
         "steps, or run forward and backward of any batch, with weight 0 if it must not count");
  expect(!(job.strategy.check.as_across_hosts && plan.placement().shared),
         "backward_nothing under check.as_across_hosts: a rank without a batch uses no units, so it cannot be compared "
         "with the others. [T0133] hint: leave the key out, or set host_sharing to false, which makes copies private");
}

/// Warns if a loss seems to be divided or scaled by the program, as in a loop that was ported from elsewhere. A loss is
/// looked at once, before the first backward.
void Training::warn_of_factor(const at::Tensor& loss) {
  const std::int64_t microbatches = job.strategy.gradient_accumulation;
  if (std::exchange(window.has_looked_at_loss, true) || activations || job.mesh.rank() != 0) return;
  // A program that adds losses up, as the loops of Tessera's integrations do, multiplies the loss by the number of
  // microbatches.
  const double factor = scaler_factor_of(loss);
  if (factor > 0 && factor != static_cast<double>(microbatches))
    log_warning(c10::str(
        "backward: the loss was multiplied by ", static_cast<std::int64_t>(factor),
        ", as GradScaler.scale does, and nobody divides gradients by it. [T0946] hint: leave the scaler out, since "
        "the Engine scales losses itself where mixed_precision.param is fp16; if the factor has another "
        "reason, nothing is wrong"));
  if (microbatches == 1 || !is_divided_by(loss, microbatches)) return;
  log_warning(
      c10::str("backward: the loss was divided by ", microbatches, ", and gradient_accumulation is ", microbatches,
               ". The Engine takes the mean over the microbatches of a step itself, so gradients and the loss that "
               "step tells are 1 / ",
               microbatches,
               " of a plain loop's. [T0134] hint: leave the division out; if it has another reason, nothing is wrong"));
}

void Training::expect_step(bool partial) const {
  const bool is_due = step_is_due();
  const char* const key = dealer ? " (Engine::microbatches)" : " (gradient_accumulation)";
  expect(is_due || window.microbatch > 0, "step wants ", partial ? 1 : microbatches(),
         partial ? " microbatch or more" : " microbatches", key,
         ", backward was called 0 times. [T0139] hint: call backward first; a rank without a "
         "batch calls backward_nothing()");
  expect(is_due || partial, "step wants ", microbatches(), " microbatches", key, ", backward was called ",
         window.microbatch, " times. [T0138] hint: where the data end, ", phrases::kPartialStep,
         " makes a step of these, and zero_grad() drops them");
}

}  // namespace tessera
