#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/existing.h"
#include "tessera/memory.h"
#include "tessera/mesh.h"
#include "tessera/own_rules.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"
#include "tessera/unpadded_epoch.h"
#include "tessera/upload.h"

namespace tessera {

class EngineCheckpoints;
class EngineSafetensors;
class QueuedStep;
class StepOutcome;

/// What one optimizer step did. The same on every rank, except where said.
///
/// On a GPU `step` does not wait for the device, but where the program brings a rule of its own or the host updates. What
/// only the device can tell (loss, grad_norm, lr, overflow, loss_scale, tokens, communication_seconds) is NaN, false or 0 until `wait`. To look at every step without slowing
/// training down, look at it one step late.
///
/// Between outer steps (Strategy::sync) "ranks" are those of this rank's replica.
struct StepResult {
  std::int64_t step = 0;  ///< attempts, from 1
  /// Mean over ranks and microbatches of the losses given to backward, by their weights (MicrobatchInfo::weight). NaN where all weights
  /// are 0.
  double loss = 0.0;
  double grad_norm = 0.0;  ///< global 2-norm of the averaged gradient, before clipping
  double lr = 0.0;
  bool overflow = false;  ///< a gradient was infinite or NaN: the step was skipped on all ranks
  bool spike = false;  ///< the loss was far above those before (Strategy::on_spike): the step was skipped on all ranks
  double loss_scale = 1.0;  ///< that this step's backward used
  std::int64_t tokens = 0;  ///< over all ranks and microbatches, as told to backward
  double seconds = 0.0;     ///< of this rank, since the previous step ended
  /// Of these, in collectives, waiting for other ranks included; also in updates. On a GPU: in which compute waited for
  /// collectives, by the device's clock (exposed communication); 0 until `wait`.
  double communication_seconds = 0.0;
  double tokens_per_second = 0.0;
  MemoryUse planned;    ///< bytes per category
  MemoryUse allocated;  ///< the most since the last step; beyond the plan only where an Engine warned

  bool is_known() const;
  /// Waits for the device and fills in what was missing. At once on the CPU, and the second time. Throws tessera::Error
  /// where a GPU notices only then: (70) that ranks gathered units in different orders; (65) with optimizer.in_backward, that a gradient
  /// was not finite.
  void wait();

 private:
  friend class QueuedStep;
  std::shared_ptr<StepOutcome> outcome_;  ///< until it is known
};

/// What backward is told beside the loss.
struct MicrobatchInfo {
  std::int64_t tokens = 0;   ///< for tokens_per_second
  std::int64_t samples = 0;  ///< needed by lr_schedule.base_batch_size
  /// This microbatch has more losses: the graph stays, and the microbatch ends with the backward that says false. Losses
  /// add up, as the gradients do.
  bool retain_graph = false;
  /// Over how many things this microbatch's loss is a mean: tokens with a label, pixels, samples. What the step trains with, and the loss
  /// that it tells, are sum(weight * mean) / sum(weight) over ranks and microbatches, so they are the means over all things, however many each
  /// microbatch has. Only ratios count. With fp16 parameters give numbers near 1 (tokens / the tokens of a full microbatch): gradients are
  /// multiplied by them before they are added up. 0: this backward takes part in what ranks do together, and counts nothing, though its loss
  /// were NaN. Each loss of one microbatch (retain_graph) comes with the same weight.
  double weight = 1.0;
};

/// A loss, and over how many things it is a mean (MicrobatchInfo::weight).
struct WeightedLoss {
  at::Tensor loss;
  double weight = 1.0;
};

/// Collectives begun by this rank since the Engine was made.
struct TrafficCounts {
  std::int64_t gathers = 0, gathered_bytes = 0, prefetched_gathers = 0;
  std::int64_t reductions = 0, reduced_bytes = 0;  ///< of units' gradients; and of outer steps ("sync")
  std::int64_t overflow_slots = 0, overflow_buckets = 0;
  double gather_seconds = 0;                                 ///< in gathers, waiting for other ranks included
  double reduction_seconds = 0;                              ///< in reductions, waiting for other ranks included
  std::int64_t disk_bytes_read = 0, disk_bytes_written = 0;  ///< of what lies on disk ("offload"), the set-up included
  double disk_wait_seconds = 0;                              ///< standing still for the disk
  std::int64_t streamed_bytes = 0;  ///< of records that were copied to the GPU to be updated; as many were copied back
  HostStepBytes host_step;          ///< copied where the host's CPU updated them instead
  std::int64_t uploaded_bytes = 0;  ///< of parameters that lie below a GPU's memory and were copied there for gathers
  HostStepBytes gradients;          ///< of sums that lie below a GPU's memory
};

/// Trains a module under a strategy.
///
///   tessera::Engine engine(model, strategy, mesh);
///   auto loss = model->forward(input, target);   // anywhere, in any way
///   engine.backward(loss);
///   tessera::StepResult result = engine.step();
///
/// Making one is collective: all ranks make it with equal modules and strategies. It moves the module's parameters into
/// flat buffers (each keeps its TensorImpl, so optimizers' and users' references stay good), on `device()`, materialises
/// deferred ones unit by unit, gives every rank rank 0's values of parameters and buffers, and shards them. From then on
/// parameters read outside an operator need a `Gathered` guard, `.grad` is taken by the engine as soon as it is made,
/// and a parameter's dtype is mixed_precision.param.
///
/// The module must outlive the Engine or die with it. After the Engine, replicated parameters keep their values, and
/// sharded ones refuse access; in both cases the next Engine over the module begins with them, fp32 masters included.
///
/// What a program may do around it, and what then happens:
///
/// | the program                                        | the Engine                                              |
/// |----------------------------------------------------|---------------------------------------------------------|
/// | runs a backward that is not the Engine's           | drops its gradients; warns once, unless another Engine's |
/// | reads or writes `.grad`                            | c10::Error with the remedy                              |
/// | clears `.grad` between backward and step           | Error (64): call zero_grad of the Engine                |
/// | freezes and unfreezes what could train at the start | goes along: a parameter without gradients stays as it is |
/// | unfreezes what was frozen at the start             | Error (64): call set_trainable, or add_group            |
/// | writes a parameter, by `.data()` too, or gives it other memory | under Gathered(kWrite): takes the values; else Error (64) |
/// | takes a raw pointer of a sharded parameter or a view of it | under Gathered: valid as long as the guard; else c10::Error with the remedy |
/// | writes through a raw pointer                       | not noticed, except under `"check"` (docs/strategy.md)   |
/// | makes a second Engine over a parameter             | Error (64) while the first lives; after that, takes its values |
///
/// One thread at a time drives an Engine and its module. Errors are tessera::Error; after one from the constructor,
/// backward, step or a gather, the group is ended on all ranks and the Engine can only be destroyed. A call out of turn
/// (step too early, backward too often, a loss that is no scalar) is the caller's mistake: an Error with exit code 64, and
/// nothing has happened.
class Engine {
 public:
  /// `own`: what the program does by rules of its own. Error (64) where the strategy wants one that is not there, or does not want one
  /// that is.
  Engine(std::shared_ptr<torch::nn::Module> module, const Strategy& strategy, const Mesh& mesh,
         const OwnRules& own = {});
  /// With one such rule alone.
  template <class Rule>
  Engine(std::shared_ptr<torch::nn::Module> module, const Strategy& strategy, const Mesh& mesh,
         std::shared_ptr<Rule> rule)
      : Engine(std::move(module), strategy, mesh, OwnRules::of(std::move(rule))) {}

  /// For a ModuleHolder such as `GPT` made by TORCH_MODULE.
  template <class Holder, class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
  Engine(const Holder& holder, const Strategy& strategy, const Mesh& mesh, const OwnRules& own = {})
      : Engine(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), strategy, mesh, own) {}
  template <class Holder, class Rule,
            class = std::enable_if_t<std::is_base_of_v<torch::detail::ModuleHolderIndicator, Holder>>>
  Engine(const Holder& holder, const Strategy& strategy, const Mesh& mesh, std::shared_ptr<Rule> rule)
      : Engine(std::static_pointer_cast<torch::nn::Module>(holder.ptr()), strategy, mesh,
               OwnRules::of(std::move(rule))) {}

  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Backward of one microbatch: `loss` is a scalar, the mean over this rank's microbatch. Gradients are averaged over
  /// ranks and over the `gradient_accumulation` microbatches of a step, by MicrobatchInfo::weight: the loss is not divided by
  /// `gradient_accumulation`, as it is in a plain loop. Where microbatches are means over different numbers of things, say how many:
  ///
  ///   engine.backward(loss, {.weight = static_cast<double>(labels.ne(-100).sum().item<std::int64_t>())});
  ///
  /// With "optimizer.in_backward" it updates parameters too, each unit's as soon as its gradients are summed. Until `step`
  /// they cannot be read then: a forward throws c10::Error, zero_grad, evaluate and Gathered throw Error (64). A gradient
  /// that is infinite or NaN is an Error (65), since the step cannot be skipped any more; on a GPU it comes with StepResult::wait,
  /// of this step or a later one, or with a call some steps later, and the rank that has what is not finite updates nothing from there on.
  void backward(const at::Tensor& loss, const MicrobatchInfo& info = {});

  /// A microbatch of a rank that has no batch, while others have: it takes part in what they do together, and counts nothing, as a
  /// backward with weight 0 whose forward need not be run. It does what this rank's latest microbatch did, so it comes after a first one
  /// (with `set_trainable`: a first one since), but in the loop of tessera/uneven.h, where the others tell it. A module whose forward makes collectives of its own (SyncBatchNorm) needs a batch on every
  /// rank. Throws Error (64): none came before, under "sign": "majority", and under check.as_across_hosts where ranks share parameters.
  /// For loaders of different lengths see tessera/uneven.h, which calls it.
  void backward_nothing();

  /// After `gradient_accumulation` calls of backward: agrees on norm and overflow with the other ranks, clips, updates
  /// parameters. Throws Error (64) if called early, but with `partial`: then the window ends with the microbatches that there are, at least
  /// one, and the step takes the mean over those. Ranks may have begun different numbers of microbatches. What is missing is a
  /// backward_nothing each. Where the data of an epoch end in the middle of a window, a program may also go on into the next epoch, whose
  /// first microbatches fill it, or drop it with zero_grad.
  StepResult step(bool partial = false);

  /// The learning rate from the next step on, with lr_schedule.type "manual": everybody's, of which each group of
  /// optimizer.groups has its lr_ratio; or that of the group of this name alone, until everybody's is set again. All ranks
  /// call it alike. Throws Error (64): another schedule, a number that is no rate, no such group; and at the next step, or on a GPU with
  /// StepResult::wait, where ranks have different rates.
  void set_lr(double lr);
  void set_lr(const std::string& group, double lr);

  /// The learning rate of the next step, as schedule or set_lr have it (but for what lr_schedule.base_batch_size makes of it):
  /// everybody's, or a group's. On a GPU it waits for the latest step. Throws Error (64): no such group.
  double lr() const;
  double lr(const std::string& group) const;

  /// A number of the update rule from the next step on, by its key in the strategy's "optimizer": weight_decay, eps, momentum,
  /// dampening, nesterov (0 or 1), alpha, lr_decay and muon.momentum, of those that the rule has; and betas, which are two. It is
  /// everybody's, and groups of optimizer.groups that have their own keep it; or that of the group of this name. A rule that updates
  /// what it always kept goes on with that: a momentum of 0 leaves the buffers as they are, for a later one. Checkpoints and durable
  /// commits hold what was set. All ranks call it alike.
  ///
  ///   engine.set_option("weight_decay", 0.04 + 0.36 * progress);
  ///   engine.set_option("head", "betas", {0.9, 0.95});
  ///
  /// Throws Error (64): a key that the rule does not have, a number that the strategy would not allow, no such group, a momentum for
  /// which there is no memory, since it is 0 in the strategy; and as set_lr where ranks have different numbers.
  void set_option(const std::string& name, double value);
  void set_option(const std::string& name, std::pair<double, double> value);
  void set_option(const std::string& group, const std::string& name, double value);
  void set_option(const std::string& group, const std::string& name, std::pair<double, double> value);

  /// The numbers that set_option sets, as they are for the next step, by key: everybody's, or a group's. Throws Error (64): no such
  /// group.
  std::map<std::string, std::vector<double>> options() const;
  std::map<std::string, std::vector<double>> options(const std::string& group) const;

  /// Drops the microbatches begun since the last step, their losses and gradients. All ranks call it at the same place.
  void zero_grad();

  /// Makes the parameters whose name matches `pattern` (`*` and `?` as in file names, over the whole path: "layers.*.bias")
  /// trainable or frozen, and plans memory anew: what trains has gradients and optimizer states, what is frozen has none.
  /// Values, masters, the states of what trained before and goes on, and the schedule's place are kept. The states of what is frozen
  /// stay too, as an optimizer of PyTorch keeps them, and go on when it trains again: until then each rank has an equal share of
  /// them in the host's memory, beside the plan. (Averages, "ema", stand still meanwhile.) Checkpoints and durable commits hold them too.
  /// Between steps; collective, with equal arguments on all ranks. Needs both plans' memory while it runs. Waits for
  /// steps under way. Errors: 64 if nothing matches or microbatches were begun.
  void set_trainable(const std::string& pattern, bool trainable);
  /// Likewise with several patterns, each of which has to match something, and one plan.
  void set_trainable(std::span<const std::string> patterns, bool trainable);

  /// Puts what `group` matches into a group of its own behind those of optimizer.groups, and makes it trainable: what
  /// Optimizer::add_param_group of PyTorch does. The group has a rate of its own by `lr_ratio`, or by set_lr with its name. Plans memory
  /// anew, as set_trainable, and under the same conditions. Errors: 78 if a pattern fits nothing, or something is in another group.
  void add_group(const ParameterGroup& group);

  /// What `evaluate` found.
  struct Evaluation {
    double loss = 0.0;         ///< mean over all batches of all ranks, by weight; NaN where all weights are 0
    std::int64_t batches = 0;  ///< on all ranks
    double weight = 0.0;       ///< sum over all batches of all ranks; as many as batches where none was given
  };

  /// The mean of `loss_of(batch)` over the batches of `loader`, a range; without gradients. `loss_of` returns a scalar tensor, or a
  /// WeightedLoss or pair {loss, weight}. With weights the number is the same on any number of ranks and for any batch size:
  ///
  ///   engine.evaluate(*loader, [&](auto& batch) {
  ///     return tessera::WeightedLoss{model->forward(batch.data, batch.target), static_cast<double>(batch.data.size(0))};
  ///   });
  ///
  /// Ranks may have different numbers of batches, but each at least one: who has fewer runs its last one again, uncounted, so that all
  /// ranks gather alike. So a RankSampler gives each sample once here, and pads nothing. (Own loops under NoGradGuard or InferenceMode
  /// work too where all ranks make the same number of forwards.) Between steps; collective. Put the module in eval mode first.
  /// Errors: 64 on all ranks if one has no batch, or where a weight is negative or not finite.
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

  /// Throws if a collective that had been queued on a GPU has failed there. Then what was read from the GPU since is
  /// worthless: call it after reading a loss in an evaluation, say. StepResult::wait and Gathered::close do. Waits for
  /// nothing.
  void check() const;

  /// True if the next step() is due.
  bool step_is_due() const;

  /// Where the module's parameters are, and its inputs must be: the CPU, or with comm.transport "nccl" or "cuda_host" this rank's GPU.
  at::Device device() const;

  /// Starts to copy `host`, tensors of the CPU, to `device()`, beside what is computed there: the next batch, while this
  /// one trains. `host` may change or go when this returns, but for pinned tensors, which are read until the copy is over.
  Upload upload(const std::vector<at::Tensor>& host);

  const Strategy& strategy() const;
  PlannedMemory plan() const;
  /// Bytes in use now, by category, counted where they are allocated.
  MemoryUse allocated() const;
  /// On a GPU, after the first step: what it needed of LibTorch's allocator beside what was there when the Engine had
  /// been made, at most.
  std::optional<std::int64_t> activation_bytes() const;
  TrafficCounts traffic() const;
  std::int64_t steps_applied() const;
  double loss_scale() const;

  /// For a process that was forked from this rank, such as a worker of a data loader: parameters that ranks share or gather
  /// refuse access there, since it takes no part in collectives. Call it there first, nothing else, and never destroy this copy
  /// of the Engine. The rank itself goes on untouched.
  void enter_forked_process();
  /// Paths of the units, the root first.
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
  /// `has_next`: has this rank a batch that was not counted? `loss_of_next`: its loss, or nothing if it was counted before.
  Evaluation evaluate_batches(const std::function<bool()>& has_next,
                              const std::function<std::optional<LossNumber>()>& loss_of_next);

  struct State;
  std::unique_ptr<State> state_;
};

/// Backward of one loss that trains several Engines' modules; each takes its own gradients. The gradients of other
/// Engines' parameters are dropped: a GAN's generator is trained through its discriminator with `generator.backward`.
void backward(const at::Tensor& loss, const std::vector<Engine*>& engines, const MicrobatchInfo& info = {});

/// While it lives, parameters are the averages of their weights ("ema" in the strategy): for evaluation, by `evaluate` or any
/// forward. A parameter that no step has updated is its own average. Weights and averages change places in memory, so nothing
/// is needed for it. Collective, between steps: all ranks make and end it at the same place.
///
///   { tessera::EmaWeights average(engine); held_out = engine.evaluate(batches, loss_of).loss; }
///
/// Throws Error (64): no "ema", microbatches begun, or under another guard. Under it backward, step, set_trainable and
/// Gathered(kWrite) throw that. An exception that leaves it ends the group on all ranks.
class EmaWeights {
 public:
  explicit EmaWeights(Engine& engine);
  /// Changing back is a collective and can fail; an error in a destructor is logged. Call `close` to have it thrown.
  ~EmaWeights();
  void close();
  EmaWeights(const EmaWeights&) = delete;
  EmaWeights& operator=(const EmaWeights&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// While it lives, parameters have their full values in memory on every rank: for code that takes `data_ptr()` or an
/// accessor, for initialisation by hand, for export. Collective: all ranks make and end it at the same place.
///
///   { tessera::Gathered guard(engine); }                            // read
///   { tessera::Gathered guard(engine, tessera::Gathered::kWrite); }  // changes made under it are kept: rank 0's values
///                                                                // become every rank's parameters and master weights
///   { tessera::Gathered guard(engine, tessera::Gathered::kEma); }    // read the averages of weights: see EmaWeights
class Gathered {
 public:
  enum Mode { kRead, kWrite, kEma };
  explicit Gathered(Engine& engine, Mode mode = kRead);
  /// Only the units (Engine::unit_names) that hold `parameters`.
  Gathered(Engine& engine, const std::vector<at::Tensor>& parameters, Mode mode = kRead);
  /// Writing back is a collective and can fail, and on a GPU so can what had only been queued; an error in a destructor is
  /// logged. Call `close` to have it thrown, before what was read under the guard is used.
  ~Gathered();
  void close();
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The plan of `module` (deferred or not) under `strategy` for one rank of `replicate` x `shard`, without making it. `own`: as the
/// Engine would be given.
PlannedMemory plan_memory(torch::nn::Module& module, const Strategy& strategy, const Topology& topology,
                          const OwnRules& own = {});

}  // namespace tessera
