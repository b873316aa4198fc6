#pragma once

// See docs/glossary.md: agreement, dealt, slot, unit.

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/age_histogram.h"
#include "tessera/existing.h"
#include "tessera/memory.h"
#include "tessera/mesh.h"
#include "tessera/own_rules.h"
#include "tessera/strategy.h"
#include "tessera/token_options.h"
#include "tessera/topology.h"
#include "tessera/unpadded_epoch.h"
#include "tessera/upload.h"

namespace tessera {

class EngineCheckpoints;
class EngineSafetensors;
class QueuedStep;
class StepOutcome;

/// The result of one optimizer step. All ranks have the same values, unless a field says otherwise.
///
/// `step` does not wait for a GPU, unless the program defines a rule, the optimizer is adafactor, or the host's CPU
/// makes updates. Until `wait`, fields that only the device computes (loss, grad_norm, lr, overflow, loss_scale,
/// tokens, communication_seconds) are NaN, false or 0. Look at results one step late to see every step without slowing
/// training down.
///
/// Here "ranks" means only the ranks of this rank's replica, while replicas train apart (Strategy::sync).
struct StepResult {
  /// Number of the step, from 1. Attempts count, so a skipped step has a number too. The number grows by 1 from one
  /// result to the next; with "sync" backups it grows by `missed` instead, if `missed` is not 0. With "sync" backups a
  /// loop therefore continues while `step` is below the number of steps that it wants. It does work that is due every N
  /// steps when `step` passes a multiple of N, so that all ranks do it together.
  std::int64_t step = 0;
  /// Weighted mean (MicrobatchInfo::weight) over ranks and microbatches of the losses given to backward. It is NaN if
  /// all weights are 0.
  double loss = 0.0;
  double grad_norm = 0.0;   ///< global 2-norm of the averaged gradient, before clipping
  double lr = 0.0;          ///< learning rate of the step
  bool overflow = false;    ///< whether a gradient was infinite or NaN; if so, the step was skipped on all ranks
  bool spike = false;       ///< whether the loss was far above earlier losses (Strategy::on_spike); if so, the step was
                            ///< skipped on all ranks
  double loss_scale = 1.0;  ///< loss scale that this step's backward used
  /// Mean and largest age of the gradients that this rank applied in the step, over all shards ("sync" asynchronous).
  /// An age is the number of other ranks' updates since the values were pulled. With "sync" hogwild it is the number of
  /// other ranks' steps since this rank's last step. In all other cases both fields are 0.
  double staleness_mean = 0.0;
  std::int64_t staleness_max = 0;  ///< the largest age
  AgeHistogram ages;  ///< number of gradients of each age in this step; Engine::staleness has the numbers for all steps
  /// This number is above 0 if, with "sync" backups, this rank's gradients came too late for the step and were dropped.
  /// It is then the number of steps that other ranks have made since this rank's last step, up to `step`. In this case
  /// `loss`, `grad_norm` and `tokens` are those of this rank only.
  std::int64_t missed = 0;
  std::int64_t dropped = 0;     ///< late gradients that all ranks have dropped so far ("sync" backups)
  std::int64_t made_again = 0;  ///< microbatches of this step that another rank completed before their own rank
                                ///< ("deal.backups")
  /// The gradient noise scale tr(Sigma) / |G|^2, which is about the batch up to which larger batches save steps
  /// ("noise_scale", arXiv 1812.06162). It is counted in samples if backward is given their number
  /// (MicrobatchInfo::samples). Otherwise it is counted as weights are (MicrobatchInfo::weight): in tokens, for
  /// example, or in microbatches if no weights are given. The field has the value that is known after this step; 0
  /// means that none is known.
  double noise_scale = 0.0;
  /// The batch of the latest measured step, counted as in noise_scale; 0 if no step was measured.
  double noise_batch = 0.0;
  /// The two parts of noise_scale, smoothed: |G|^2, the square of the gradient's norm without noise, and tr(Sigma), the
  /// variance of the gradient of one sample. The estimates have no bias, so each of them may be below 0.
  double noise_square = 0.0, noise_variance = 0.0;
  std::int64_t tokens = 0;  ///< tokens of all ranks and microbatches, as given to backward
  double seconds = 0.0;     ///< this rank's time since the previous step ended
  /// The part of `seconds` spent in collectives, including those of updates, and including waits for other ranks. On a
  /// GPU it is the time in which compute waited for collectives, by the device's clock (exposed communication); 0 until
  /// `wait`.
  double communication_seconds = 0.0;
  double tokens_per_second = 0.0;  ///< tokens of all ranks divided by `seconds`
  /// The rank for which the other ranks waited. From the end of the previous step to the agreement on this step, it was
  /// busy longest with its data, its forward and its backward. If replicas train apart ("sync" local_sgd or diloco), it
  /// is a rank of this rank's replica. It is -1 if there is one rank, if a GPU trains (since the host does not wait for
  /// its steps), or with "sync" asynchronous, hogwild or backups.
  int waited_for_rank = -1;
  /// Mean of the seconds for which the other ranks waited for waited_for_rank, since they were busy for less time. It
  /// is 0 if waited_for_rank is -1.
  double waited_for_seconds = 0.0;
  /// The part of `seconds` in which this rank had no data. It is the time from the end of a step, or of a backward that
  /// is not the step's last, to the next operator that reads a parameter. On a GPU it is the host's time, in which the
  /// device may still work. It is NaN if the strategy does not watch operators and Engine::time_data was not called.
  double data_seconds = 0.0;
  /// Parts of `seconds` for which this thread was in TokenBatches::next, and in Engine::upload and Upload::tensors,
  /// wherever the program called them. Neither field counts work that other threads do in advance.
  double batch_seconds = 0.0, upload_seconds = 0.0;
  /// Floating-point operations of this rank's operators in a step: of forward, backward and recomputation, as
  /// torch.utils.flop_counter counts them. Products inside an operator for which flop_counter has no formula are
  /// counted too (bilinear and recurrent layers, grouped products on the CPU). Operations are counted once, in the
  /// first step of an Engine or after set_trainable. Operations of `evaluate` are not counted.
  std::int64_t flop = 0;
  double peak_tflops = 0.0;  ///< the device's peak (Engine::set_peak_tflops); 0 if it is not known
  MemoryUse planned;         ///< planned bytes by category
  MemoryUse allocated;  ///< largest bytes by category since the last step; they exceed the plan only if an Engine has
                        ///< warned of it

  /// s = T_comm / (T_comp + T_comm), the share of this rank's time in which it communicates: communication_seconds /
  /// seconds. It is 0 if no time was measured. tessera/scaling.h computes a speed-up from it.
  double communication_share() const { return seconds > 0 ? communication_seconds / seconds : 0.0; }
  /// TFLOP/s of this rank: flop / seconds / 10^12. It is 0 if no time was measured.
  double tflops() const { return seconds > 0 ? static_cast<double>(flop) / seconds * 1e-12 : 0.0; }
  /// Returns the fraction of the device's peak that this rank reached; NaN if the peak is not known. This is "model
  /// FLOP utilization", except that recomputation is counted too.
  double mfu() const { return peak_tflops > 0 ? tflops() / peak_tflops : std::numeric_limits<double>::quiet_NaN(); }
  /// Returns false while some of the fields are still to come from a GPU; see `wait`.
  bool is_known() const;
  /// Waits for the device and fills in the missing fields. On the CPU, and when it is called again, it returns at once.
  /// Throws the errors of a GPU's step, which are known only then, as tessera::Error: 70 if ranks gathered units in
  /// different orders; 65 if a gradient was not finite, with optimizer.in_backward; 64 if ranks have different rates or
  /// options; 78 if the loss is negative, with on_spike.
  void wait();

 private:
  friend class QueuedStep;
  std::shared_ptr<StepOutcome> outcome_;  ///< shared with the step on the GPU until the result is known; else empty
};

/// The data of a microbatch that the program gives to backward in addition to the loss.
struct MicrobatchInfo {
  std::int64_t tokens = 0;  ///< tokens of this microbatch on this rank, for tokens_per_second
  /// Samples of this microbatch on this rank. lr_schedule.base_batch_size, warmup_samples and warmup_epochs need them.
  std::int64_t samples = 0;
  /// True: more losses of this microbatch follow, so the graph stays. The backward with the value false ends the
  /// microbatch. Losses add up, as the gradients do.
  bool retain_graph = false;
  /// The number of items over which this microbatch's loss is a mean: tokens with a label, pixels, samples. The step
  /// uses and reports sum(weight * mean) / sum(weight) over ranks and microbatches. This quotient is the mean over all
  /// items, whatever their number in each microbatch. Only the ratios of weights matter. Give numbers near 1 with fp16
  /// parameters (tokens / the tokens of a full microbatch), since gradients are multiplied by them before they are
  /// added up. If the weight is 0, this backward takes part in collectives but contributes nothing, even if its loss is
  /// NaN. All losses of one microbatch (retain_graph) have the same weight.
  double weight = 1.0;
};

/// A loss (a scalar tensor), and the number of items over which it is a mean (MicrobatchInfo::weight).
struct WeightedLoss {
  at::Tensor loss;      ///< a scalar of a floating-point dtype
  double weight = 1.0;  ///< not negative, finite
};

/// Counts of the communication and the copies of this rank since the Engine was made. Other ranks are not counted.
struct TrafficCounts {
  /// All-gathers of units, their bytes, and how many of them were prefetched.
  std::int64_t gathers = 0, gathered_bytes = 0, prefetched_gathers = 0;
  std::int64_t reductions = 0, reduced_bytes = 0;  ///< reductions of units' gradients, and of outer steps ("sync")
  /// Slots and buckets that were allocated beyond the plan, of which the Engine has warned.
  std::int64_t overflow_slots = 0, overflow_buckets = 0;
  double gather_seconds = 0;                                 ///< time in gathers, including waits for other ranks
  double reduction_seconds = 0;                              ///< time in reductions, including waits for other ranks
  std::int64_t disk_bytes_read = 0, disk_bytes_written = 0;  ///< bytes of offloaded state ("offload"), set-up included
  double disk_wait_seconds = 0;                              ///< time in which training waited for the disk
  std::int64_t streamed_bytes = 0;  ///< bytes of records copied to the GPU for updates; the same number was copied back
  HostStepBytes host_step;          ///< bytes copied for updates that the host's CPU makes in place of the GPU
  std::int64_t uploaded_bytes = 0;  ///< bytes of offloaded parameters that were copied to the GPU for gathers
  HostStepBytes gradients;          ///< bytes copied for offloaded sums of gradients, which lie in the host's memory or
                                    ///< in files
};

/// The times for which one unit's calls of one kind were under way on this rank. A time lasts from a call's beginning
/// to the moment at which the rank noticed that the call had ended, whatever the rank did meanwhile. Times are in
/// seconds. Percentiles are at most 1/16 above a time that was measured.
struct CallLatency {
  std::string call;  ///< "gather": an all-gather of parameters, or a pull; "reduce": the sum of gradients over ranks
  std::string unit;  ///< Engine::unit_names
  std::int64_t count = 0;                     ///< number of calls that were measured
  double p50 = 0, p95 = 0, p99 = 0, max = 0;  ///< median, two more percentiles, and the longest time
};

/// Trains a module under a strategy.
///
///   tessera::Engine engine(model, strategy, mesh);
///   auto loss = model->forward(input, target);   // anywhere, in any way
///   engine.backward(loss);
///   tessera::StepResult result = engine.step();
///
/// The constructor is collective: all ranks call it with equal modules and strategies. It moves the module's parameters
/// into flat buffers on `device()` (each parameter keeps its TensorImpl, so references of optimizers and programs stay
/// valid). It materialises deferred parameters unit by unit, gives all ranks the parameters and buffers of rank 0, and
/// shards the parameters. After that, reading a parameter outside of an operator needs a `Gathered` guard. The Engine
/// takes each `.grad` as soon as it is computed. The dtype of parameters is mixed_precision.param.
///
/// The module must outlive the Engine or die with it. After the Engine is destroyed, replicated parameters keep their
/// values, and sharded parameters refuse access. In both cases the next Engine over the module starts with their
/// values, including fp32 masters.
///
/// This table lists actions of a program, and the Engine's reaction to them:
///
/// | the program                                        | the Engine                                              |
/// |----------------------------------------------------|---------------------------------------------------------|
/// | runs a backward that is not the Engine's           | drops its gradients; warns once, unless another Engine's |
/// | reads or writes `.grad`                            | c10::Error with the remedy                              |
/// | clears `.grad` between backward and step           | Error (64): call zero_grad of the Engine                |
/// | freezes and unfreezes what could train at the start | follows: a parameter without gradients stays as it is   |
/// | unfreezes what was frozen at the start             | Error (64): call set_trainable, or add_group            |
/// | writes a parameter (also by `.data()`), moves it   | takes the values under Gathered(kWrite); else Error (64) |
/// | takes a pointer of a sharded parameter, or a view  | valid under Gathered; else c10::Error with the remedy    |
/// | writes through a raw pointer, under kRead or kEma  | Error (64) when that guard ends                          |
/// | writes through a raw pointer outside of guards     | not noticed, except under `"check"` (docs/strategy.md)   |
/// | makes a second Engine over a parameter             | Error (64) while the first lives; then takes its values  |
///
/// One thread at a time drives an Engine and its module. Errors are tessera::Error. An error of the constructor, of
/// backward, of step or of a gather ends the communication on all ranks; after that the Engine can only be destroyed. A
/// wrong call (step too early, backward too often, a loss that is not a scalar) is the caller's mistake. It throws an
/// Error with exit code 64 and changes nothing.
class Engine {
 public:
  /// Makes an Engine for a module (see the description of the class). `own` has the rules that the program defines.
  /// Throws Error (64) if the strategy asks for a rule that `own` does not have, or if `own` has a rule for which the
  /// strategy does not ask.
  Engine(std::shared_ptr<torch::nn::Module> module, const Strategy& strategy, const Mesh& mesh,
         const OwnRules& own = {});
  /// Makes an Engine with one rule of the program: an ElementwiseOptimizer, a MatrixOptimizer or a CommHook.
  template <class Rule>
  Engine(std::shared_ptr<torch::nn::Module> module, const Strategy& strategy, const Mesh& mesh,
         std::shared_ptr<Rule> rule)
      : Engine(std::move(module), strategy, mesh, OwnRules::of(std::move(rule))) {}

  /// Makes an Engine for a ModuleHolder, such as a `GPT` made by TORCH_MODULE.
  template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
  Engine(const Holder& holder, const Strategy& strategy, const Mesh& mesh, const OwnRules& own = {})
      : Engine(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), strategy, mesh, own) {}
  /// Makes an Engine for a ModuleHolder with one rule of the program.
  template <class Holder, class Rule,
            class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
  Engine(const Holder& holder, const Strategy& strategy, const Mesh& mesh, std::shared_ptr<Rule> rule)
      : Engine(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), strategy, mesh,
               OwnRules::of(std::move(rule))) {}

  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Runs backward of one microbatch. `loss` is a scalar: the mean over this rank's microbatch. Gradients are averaged
  /// over ranks and over the `gradient_accumulation` microbatches of a step, by MicrobatchInfo::weight. Do not divide
  /// the loss by `gradient_accumulation` as a plain loop does. If losses are means over different numbers of samples or
  /// tokens, give that number as MicrobatchInfo::weight. The call is collective.
  ///
  ///   engine.backward(loss, {.weight = static_cast<double>(labels.ne(-100).sum().item<std::int64_t>())});
  ///
  /// With "optimizer.in_backward" it also updates each unit's parameters as soon as the unit's gradients are summed.
  /// Parameters cannot be read between the first such update and `step`: a forward throws c10::Error; zero_grad,
  /// evaluate and Gathered throw Error (64). An infinite or NaN gradient is an Error (65), since the step can no longer
  /// be skipped. On a GPU the error is thrown by StepResult::wait of this or a later step, or by a call some steps
  /// later. The rank whose gradient is not finite updates no further units.
  void backward(const at::Tensor& loss, const MicrobatchInfo& info = {});

  /// Returns the number of the microbatch that this rank computes next, among those of its step on all ranks. A program
  /// chooses its data by this number, so that any number of ranks trains on the same data (docs/reproducible.md). The
  /// number is round * ranks + rank, as TokenBatches deals samples. With Strategy::reproducible and gradient_sync
  /// "last_microbatch", a rank's microbatches follow each other (SamplerOptions::runs), and the number is rank *
  /// gradient_accumulation + round. With "deal" by speed it is microbatches().begin + round. With "deal.backups" it may
  /// be the number of another rank's microbatch, after this rank's own microbatches; so call this function before each
  /// forward.
  std::int64_t microbatch() const;

  /// Returns the run of the step's microbatches that this rank computes, among those of all ranks. It has as many
  /// microbatches as there are calls of backward before the next step, except with "deal.backups". If "deal" is by
  /// speed, a step may change the run: call this after each step, and give the result to the data (TokenBatches::deal,
  /// RankSampler::deal). Throws Error (64) if microbatches are dealt to ranks one by one, so that those of a rank are
  /// not neighbours.
  MicrobatchRun microbatches() const;

  /// If workers may join and leave ("sync.elastic"), returns the number of the step whose data this worker takes next.
  /// Numbers are from 0 to `steps` - 1, and all workers make these steps together. Each step is given to one worker. If
  /// that worker leaves before it has made the step, the step is given to another worker. While other workers still
  /// make the last steps, the call waits. When all steps are made, it returns nothing, and the parameters are the
  /// newest. Steps may be taken ahead; `step` makes them in the order in which they were taken. The call also returns
  /// nothing if this worker itself has taken the last steps ahead and must make them first; then steps_are_over() is
  /// false.
  ///
  ///   while (const auto step = engine.take_step(1000, batches.data_order())) {
  ///     batches.go_to_step(*step);
  ///     while (!engine.step_is_due()) engine.backward(loss_of(batches.next()));
  ///     engine.step();
  ///   }
  ///   if (engine.writes_results()) {
  ///     save_weights(engine, "weights.pt");
  ///     engine.note_results_written();
  ///   }
  ///
  /// `data_order` is a number that identifies the data of all steps, such as TokenBatches::data_order. A program with
  /// data of its own may compute the number from the count of samples, the seed and the batch size.
  ///
  /// Throws Error (64) without "sync.elastic", and if other workers give other numbers; 75 if the other workers do not
  /// finish within comm.timeout_s.
  std::optional<std::int64_t> take_step(std::int64_t steps, std::int64_t data_order = 0);
  /// Returns whether all steps are made, as the latest `take_step` has found.
  bool steps_are_over() const;
  /// Returns whether this process writes the results of a run. Rank 0 writes them; if workers may join and leave
  /// ("sync.elastic"), one of the workers that train at the end writes them. If that process leaves without
  /// note_results_written, a worker that asks later writes the results too, with the same values.
  bool writes_results() const;
  /// Reports that this process has written the results. If workers may join and leave, no later worker is then told to
  /// write them again. Without "sync.elastic" it does nothing. If server 0 is lost, this process still ends without an
  /// error, and a line of the log reports that the results are not noted. Throws Error (64) if another worker writes
  /// them.
  void note_results_written();

  /// Runs a microbatch on a rank that has no batch while other ranks have one. The rank takes part in collectives and
  /// contributes nothing, as in a backward with weight 0, but without a forward. The call repeats the communication of
  /// this rank's latest microbatch, so this rank must have had a microbatch before (since `set_trainable`, if that was
  /// called). The loop of tessera/uneven.h does not require this, since there the other ranks announce their
  /// collectives. A module whose forward is itself collective (SyncBatchNorm) needs a batch on every rank. Throws Error
  /// (64) if this rank had no microbatch before; under compression.method "sign_majority"; under check.as_across_hosts
  /// if ranks share parameters; and before a step's first microbatch if sync.replica_ranks is above 1. tessera/uneven.h
  /// calls it for loaders of different lengths.
  void backward_nothing();

  /// Makes an optimizer step after `gradient_accumulation` calls of backward: agrees on norm and overflow with the
  /// other ranks, clips gradients, and updates parameters. It is collective. Throws Error (64) if called early without
  /// `partial`. `partial` ends the step's window of microbatches early, with the microbatches that were begun (at least
  /// one). The step takes the mean over these microbatches. Ranks may have begun different numbers of microbatches:
  /// each missing microbatch counts as a backward_nothing. If an epoch ends in the middle of a window, a program may
  /// also fill the window with the first microbatches of the next epoch, or drop the window with zero_grad.
  StepResult step(bool partial = false);

  /// Sets the learning rate from the next step on, if lr_schedule.type is "manual". A rate without a group is for all
  /// parameters; each group of optimizer.groups gets this rate times its lr_ratio. A rate with a group is only for that
  /// group, until a rate without a group is set again. All ranks must make the same call. Throws Error (64) for another
  /// schedule, a number outside of 0 to 1000, or an unknown group. The next step (on a GPU, StepResult::wait) throws
  /// Error (64) if ranks have different rates.
  void set_lr(double lr);
  /// Sets the learning rate of one group of optimizer.groups.
  void set_lr(const std::string& group, double lr);

  /// Returns the learning rate of the next step, for all parameters or for a group, from the schedule or set_lr. The
  /// factor of lr_schedule.base_batch_size is not included. If the rate rises over samples (warmup_samples), the next
  /// step is assumed to have as many samples as the latest step. On a GPU it waits for the latest step. Throws Error
  /// (64) for an unknown group.
  double lr() const;
  /// Returns the learning rate of the next step for one group.
  double lr(const std::string& group) const;

  /// Sets the number of samples that an epoch has over all ranks, for lr_schedule.warmup_epochs. This number replaces
  /// the strategy's epoch_samples. Call it before the first backward, and again after a load. Without warmup_epochs
  /// nothing depends on this number. The call is collective. Throws Error (64) on all ranks if their numbers differ, if
  /// a number is below 1, or between backward and step.
  void set_epoch_samples(std::int64_t samples);

  /// Sets a number of the update rule from the next step on. `name` is its key in the strategy's "optimizer":
  /// weight_decay, eps, momentum, dampening, nesterov (0 or 1), alpha, lr_decay, muon.momentum, or betas, which are two
  /// numbers. The rule must have the key. A number without a group is for all parameters, except those in groups of
  /// optimizer.groups that have their own number. A number with a group is for that group. The state that a rule keeps
  /// does not change: with a momentum of 0 the buffers stay as they are for a later momentum. Checkpoints and durable
  /// commits hold the numbers that were set. All ranks must make the same call.
  ///
  ///   engine.set_option("weight_decay", 0.04 + 0.36 * progress);
  ///   engine.set_option("head", "betas", {0.9, 0.95});
  ///
  /// Throws Error (64) for an unknown group, a key that the rule does not have, or a number that the strategy would not
  /// allow. It also throws if `name` is a momentum that is 0 in the strategy, since the plan then has no memory for its
  /// buffer. If ranks have different numbers, the same error is thrown as with set_lr.
  void set_option(const std::string& name, double value);
  /// Sets the two numbers of betas for all parameters.
  void set_option(const std::string& name, std::pair<double, double> value);
  /// Sets a number for one group.
  void set_option(const std::string& group, const std::string& name, double value);
  /// Sets the two numbers of betas for one group.
  void set_option(const std::string& group, const std::string& name, std::pair<double, double> value);

  /// Returns the numbers that set_option sets, by key, as the next step uses them: those of all parameters or of a
  /// group. Throws Error (64) for an unknown group.
  std::map<std::string, std::vector<double>> options() const;
  /// Returns the numbers of one group.
  std::map<std::string, std::vector<double>> options(const std::string& group) const;

  /// Drops the microbatches begun since the last step, with their losses and gradients. All ranks call it at the same
  /// point of training.
  void zero_grad();

  /// Makes the parameters whose name matches `pattern` trainable or frozen, and plans memory anew. Patterns use `*` and
  /// `?` as file names do, over the whole path: "layers.*.bias". A parameter that trains has gradients and optimizer
  /// states; a frozen one has none. Values, masters, the states of parameters that continue to train, and the
  /// schedule's position are kept. States of frozen parameters are kept too, as an optimizer of PyTorch keeps them, and
  /// are used when the parameters train again. Meanwhile each rank has an equal share of these states in its host's
  /// memory. The plan does not count this share. Averages ("ema") of frozen parameters do not change. Checkpoints and
  /// durable commits hold these states too.
  ///
  /// Call it between steps, with equal arguments on all ranks. It is collective. It needs the memory of both plans
  /// while it runs, and waits for steps under way. Throws Error (64) if nothing matches or microbatches were begun,
  /// under a guard, with "durable", or while replicas train apart ("sync").
  void set_trainable(const std::string& pattern, bool trainable);
  /// Makes the parameters that several patterns name trainable or frozen, with one new plan. Each pattern must match a
  /// parameter.
  void set_trainable(std::span<const std::string> patterns, bool trainable);

  /// Puts the parameters that `group` matches into a new group behind those of optimizer.groups, and makes them
  /// trainable, as Optimizer::add_param_group of PyTorch does. The group's rate follows from `lr_ratio`, or from set_lr
  /// with its name. The call plans memory anew, under the conditions of set_trainable. Throws Error (78) if a pattern
  /// matches nothing, or a parameter is in another group.
  void add_group(const ParameterGroup& group);

  /// The result of `evaluate`, the same on all ranks.
  struct Evaluation {
    double loss = 0.0;         ///< weighted mean over all batches of all ranks; NaN if all weights are 0
    std::int64_t batches = 0;  ///< batches of all ranks
    double weight = 0.0;       ///< sum over all batches of all ranks; the number of batches if no weights were given
  };

  /// Returns the mean of `loss_of(batch)` over the batches of `loader` (a range), computed without gradients. `loss_of`
  /// returns a scalar tensor, or a WeightedLoss or pair {loss, weight}. If losses have weights, the result is the
  /// same for any number of ranks and any batch size:
  ///
  ///   engine.evaluate(*loader, [&](auto& batch) {
  ///     const at::Tensor loss = model->forward(batch.data, batch.target);
  ///     return tessera::WeightedLoss{loss, static_cast<double>(batch.data.size(0))};
  ///   });
  ///
  /// Ranks may have different numbers of batches, but each needs at least one. A rank with fewer batches runs its last
  /// batch again, without counting it, so that all ranks make the same gathers. A RankSampler therefore gives each
  /// sample once here, without padding. (A loop that the program writes itself, under NoGradGuard or InferenceMode,
  /// works too if all ranks make the same number of forwards.) Put the module in eval mode first. The call is
  /// collective and is made between steps. Throws Error (64) on all ranks if a rank has no batch, or if a weight is
  /// negative or not finite; the job can continue.
  template <class Loader, class LossOf>
  Evaluation evaluate(Loader&& loader, LossOf&& loss_of) {
    auto next = [&] {
      const UnpaddedEpoch unpadded;
      return std::begin(loader);
    }();
    const auto end = std::end(loader);
    std::optional<std::decay_t<decltype(*next)>> batch;
    const auto loss_of_next = [&]() -> std::optional<LossNumber> {
      const bool is_new = next != end;
      if (is_new) {
        batch.emplace(*next);
        ++next;
      }
      const LossNumber found = number_of(loss_of(*batch));
      return is_new ? std::optional<LossNumber>(found) : std::nullopt;
    };
    return evaluate_batches([&] { return next != end; }, loss_of_next);
  }

  /// Throws tessera::Error if a collective that was queued on a GPU has failed there. Values that were read from the
  /// GPU since the failure may be wrong. So call this function, for example, after reading a loss in an evaluation.
  /// StepResult::wait and Gathered::close call this function. It does not wait.
  void check() const;

  /// Returns true if step() is due: this rank has no microbatch of the step left to compute. Without "deal", step() is
  /// due after `gradient_accumulation` microbatches.
  bool step_is_due() const;

  /// Returns the device of the module's parameters, on which its inputs must be too. With comm.transport "nccl" or
  /// "cuda_host" it is this rank's GPU, otherwise the CPU.
  at::Device device() const;

  /// Starts to copy `host`, tensors on the CPU, to `device()` while the device computes. A program can thus copy the
  /// next batch while the present batch trains. `host` may change or be freed when this returns, except pinned tensors,
  /// which are read until the copy has ended.
  Upload upload(const std::vector<at::Tensor>& host);

  /// Returns the strategy in use, with all defaults filled in.
  const Strategy& strategy() const;
  /// Returns the memory plan of this rank, in bytes.
  PlannedMemory plan() const;
  /// Returns the bytes in use now by category, counted where they are allocated. The call is not collective.
  MemoryUse allocated() const;
  /// Returns the peak of the bytes that LibTorch's allocator gave out in the first step, beyond those that were
  /// allocated when the Engine had been made. Returns nothing before the first step, and on the CPU.
  std::optional<std::int64_t> activation_bytes() const;
  /// Returns counts of the communication and the copies of this rank so far.
  TrafficCounts traffic() const;
  /// Measures StepResult::data_seconds from the next step on, whatever the strategy. If an Engine gathers parameters,
  /// or sends parameters after the update, these seconds are measured in any case. Otherwise the measurement makes
  /// LibTorch allocate memory a few times in each step.
  void time_data();
  /// Sets the peak of this rank's device in TFLOP/s, for StepResult::mfu from the next step on. The peaks of
  /// data-center GPUs are known already, for products in the parameters' dtype. Throws Error (64) unless the number is
  /// above 0.
  void set_peak_tflops(double tflops);
  /// Returns the peak that was set or is known; 0 if it is not known.
  double peak_tflops() const;
  /// Begins to keep histograms of how long each unit's gathers and reductions take, until the Engine ends. The
  /// histograms have a fixed size: 5 KiB for each unit, which the plan does not count. A call costs two readings of the
  /// clock. On a GPU a call costs two events, and the device's clock measures its time. This time lasts from the point
  /// of the stream at which the call is queued to the point at which the stream has waited for the call.
  void time_calls();
  /// Returns the ages of this rank's gradients in all steps so far ("sync" asynchronous and hogwild); zeros in all
  /// other cases.
  AgeHistogram staleness() const;
  /// Returns the latencies that time_calls has measured so far: first those of gathers, in the order of units, then
  /// those of reductions. Kinds of calls that have not occurred are left out. The result is empty without time_calls.
  /// On a GPU it waits for the device to finish the calls that have ended on the host.
  std::vector<CallLatency> latencies() const;
  /// Returns the number of steps that updated parameters, without skipped steps. On a GPU it waits for the latest step.
  std::int64_t steps_applied() const;
  /// Returns the samples of all ranks in the steps that updated parameters, as the program gave them to backward
  /// (MicrobatchInfo::samples). Checkpoints and durable commits keep the number. If replicas train apart ("sync"), each
  /// step counts this replica's samples times the number of replicas. With "sync" asynchronous and hogwild, only this
  /// rank's samples are counted, or those of its replica (sync.replica_ranks). On a GPU it waits for the latest step.
  std::int64_t samples_seen() const;
  /// Returns the loss scale of the next backward; 1 unless parameters are fp16.
  double loss_scale() const;

  /// Prepares the Engine's copy in a process that was forked from this rank, such as a worker of a data loader.
  /// Parameters that ranks share or gather refuse access there, since the fork takes no part in collectives. Call it
  /// first in the fork, make no other call of this Engine there, and never destroy this copy. The rank itself is not
  /// affected.
  void enter_forked_process();
  /// Returns the paths of the units; the root, "(root)", comes first.
  std::vector<std::string> unit_names() const;

 private:
  friend class EmaWeights;
  friend class EngineCheckpoints;
  friend class EngineSafetensors;
  friend class Gathered;
  friend class UnevenLoop;
  friend void backward(const at::Tensor& loss, const std::vector<Engine*>& engines, const MicrobatchInfo& info);
  struct LossNumber {
    double loss = 0.0, weight = 1.0;
  };
  template <class Loss>
  static LossNumber number_of(const Loss& found) {
    if constexpr (std::is_convertible_v<const Loss&, at::Tensor>) {
      return {static_cast<at::Tensor>(found).template item<double>(), 1.0};
    } else {
      const auto& [loss, weight] = found;
      return {loss.template item<double>(), static_cast<double>(weight)};
    }
  }
  /// `has_next` returns whether this rank has a batch that was not counted. `loss_of_next` returns the loss of the next
  /// batch, or nothing if that batch was counted before.
  Evaluation evaluate_batches(const std::function<bool()>& has_next,
                              const std::function<std::optional<LossNumber>()>& loss_of_next);

  struct State;
  std::unique_ptr<State> state_;
};

/// Runs backward of one loss that trains several Engines' modules; each Engine takes its own gradients. Gradients of
/// other Engines' parameters are dropped. So a backward of the generator's Engine alone trains the generator of a GAN
/// through the discriminator. The call is collective. Errors are those of Engine::backward.
void backward(const at::Tensor& loss, const std::vector<Engine*>& engines, const MicrobatchInfo& info = {});

/// A guard: while it lives, parameters are the averages of their weights ("ema" in the strategy). It is meant for
/// evaluation, by `evaluate` or any forward. A parameter that no step has updated is its own average. Weights and
/// averages are exchanged in memory, so the guard needs no further memory. The guard is collective and is used between
/// steps: all ranks make and end it at the same point of training.
///
///   { tessera::EmaWeights average(engine); held_out = engine.evaluate(batches, loss_of).loss; }
///
/// Throws Error (64) without "ema", after microbatches were begun, or under another guard. Backward, step,
/// set_trainable and Gathered(kWrite) throw Error (64) under this guard. An exception that leaves the guard's scope
/// ends the communication on all ranks.
class EmaWeights {
 public:
  /// Exchanges weights and averages. `engine` must outlive the guard.
  explicit EmaWeights(Engine& engine);
  /// Exchanges weights and averages back. This is a collective and can fail; the destructor then logs the error.
  ~EmaWeights();
  /// Exchanges weights and averages back, as the destructor does, but throws an Error if that fails.
  void close();
  EmaWeights(const EmaWeights&) = delete;
  EmaWeights& operator=(const EmaWeights&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A guard: while it lives, parameters have their full values in memory on every rank. It is meant for code that takes
/// `data_ptr()` or an accessor, for initialisation by hand, and for export. It is collective: all ranks make and end it
/// at the same point of training. Errors are tessera::Error; 64 for a call that is not allowed at this time.
///
///   { tessera::Gathered guard(engine); }                             // read
///   { tessera::Gathered guard(engine, tessera::Gathered::kWrite); }  // write
///   { tessera::Gathered guard(engine, tessera::Gathered::kEma); }    // read the averages of weights: see EmaWeights
///
/// Changes made under kWrite are kept: rank 0's values become every rank's parameters and master weights. Under kRead
/// and kEma a change is an error when the guard ends, under every strategy alike; the error ends the communication on
/// all ranks. To notice writes through pointers, such a guard hashes its parameters when it begins and when it ends. A
/// guard with kWrite may not begin under a guard that only reads.
class Gathered {
 public:
  /// The use of the parameters under the guard: the program reads parameters, writes them, or reads averages.
  enum Mode { kRead, kWrite, kEma };
  /// Gathers all units.
  explicit Gathered(Engine& engine, Mode mode = kRead);
  /// Gathers only the units (Engine::unit_names) that hold `parameters`.
  Gathered(Engine& engine, const std::vector<at::Tensor>& parameters, Mode mode = kRead);
  /// Writes back under kWrite. The write is a collective and can fail. Errors of calls that were queued on a GPU may
  /// also be noticed here. The destructor logs the error.
  ~Gathered();
  /// Ends the guard as the destructor does, but throws an Error if that fails. Call it before using values that were
  /// read under the guard.
  void close();
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;

 private:
  friend class EngineSafetensors;
  struct State;
  enum OwnUse { kForOwnUse };
  /// A guard that reads for the Engine itself. No code of the program runs under this guard, so the guard hashes
  /// nothing.
  Gathered(Engine& engine, const std::vector<at::Tensor>& parameters, OwnUse);
  std::unique_ptr<State> state_;
};

/// Returns the memory plan of `module` (deferred or not) under `strategy` for one rank of the mesh that `topology` and
/// the strategy make, without making an Engine. `own`: the rules that the Engine would get. Throws tessera::Error if
/// the Engine's constructor would refuse the strategy.
PlannedMemory plan_memory(torch::nn::Module& module, const Strategy& strategy, const Topology& topology,
                          const OwnRules& own = {});

}  // namespace tessera
