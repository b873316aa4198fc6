#pragma once

// See docs/glossary.md: dealt, unit.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/activations/saved_activations.h"
#include "engine/device/data_seconds.h"
#include "engine/device/queued_call_times.h"
#include "engine/job/job.h"
#include "engine/memory/durable_files.h"
#include "engine/memory/frozen_states.h"
#include "engine/memory/make_plan.h"
#include "engine/memory/training_memory.h"
#include "engine/parameters/gradient_hooks.h"
#include "engine/parameters/parameter_checks.h"
#include "engine/step/agree/gradient_norm.h"
#include "engine/step/step.h"
#include "engine/training/backup_claims.h"
#include "engine/training/flop_counter.h"
#include "engine/training/microbatch_dealer.h"
#include "engine/training/microbatch_statistics.h"
#include "engine/training/replica_sync.h"
#include "engine/training/round_meeting.h"
#include "optim/optimizer.h"
#include "runtime/base/metrics/latency_histogram.h"
#include "sharding/gather/data_wait.h"
#include "sharding/gather/op_watch.h"
#include "sharding/gather/publication.h"
#include "sharding/gather/residency.h"
#include "sharding/gather/use_times.h"
#include "sharding/reduce/reducer.h"
#include "sharding/round_log.h"
#include "tessera/engine.h"

namespace tessera {

/// The allocated memory, and the memory that the first step needed beyond it.
struct Footprint {
  MemoryUse allocated;
  std::int64_t at_start = 0;  ///< bytes in LibTorch's allocator on a GPU, at the end of the set-up
  std::optional<std::int64_t> activation_bytes;
};

/// The kind of values that parameters have at the moment, and the guards that use them.
struct ValuesInUse {
  bool loaded = false;        ///< whether parameters have their values and places
  bool half_loaded = false;   ///< whether a load failed after it had begun to write
  bool are_averages = false;  ///< whether parameters and their averages have swapped their values
  int open_guards = 0;        ///< number of living Gathered guards
  int open_writes = 0;        ///< number of living Gathered(kWrite) guards
  std::optional<ParameterChecks> checks;
};

/// Brings gradients from backward to the step. Members are destroyed last to first.
struct Gradients {
  /// set on the CPU, and if ranks have common parameters; otherwise a GPU computes the norm in a separate pass
  std::optional<GradientNorm> norm;
  std::optional<Reducer> reducer;
  std::optional<GradientHooks> hooks;
};

/// Provides the values of the parameters that an operator reads. Members are destroyed last to first.
struct Gathering {
  std::optional<GatherLog> log;            ///< the gathers of this step
  std::optional<Publication> publication;  ///< set if values are published after the update has returned
  std::unique_ptr<Carrier> parts;          ///< null if no parameters are offloaded
  std::optional<Residency> residency;      ///< set if parameters are sharded or offloaded
  std::optional<OpWatch> watch;
};

/// The microbatches of the step under way.
struct Window {
  /// Begins the window of the next step.
  void begin() {
    local = {};
    microbatch = 0;
    weight.reset();
  }

  std::int64_t microbatch = 0;   ///< number of microbatches since the last step
  std::optional<double> weight;  ///< weight of the microbatch, if further losses of it follow
                                 ///< (MicrobatchInfo::retain_graph)
  LocalStep local;
  RoundLog rounds;
  std::optional<MicrobatchStatistics> statistics;  ///< set with "broadcast_buffers" microbatch_order, if the module has
                                                   ///< batch norms
  std::optional<RoundMeeting> meeting;             ///< meeting for the next microbatch, on a rank without a batch
  bool has_looked_at_loss = false;                 ///< whether Training::warn_of_factor has looked at a loss
  bool knows_microbatches = false;    ///< whether the program has asked for this rank's microbatches, or was warned
  std::optional<std::int64_t> asked;  ///< the number that Engine::microbatch has returned since the last microbatch
  std::uint32_t seed = 0;             ///< under "reproducible": seed of the run's random numbers
                                      ///< (Training::take_seed)
};

/// The times for which gathers and reductions were under way, for each unit.
struct CallLatencies {
  explicit CallLatencies(std::size_t units) : gathers(units), reductions(units) {}
  std::vector<LatencyHistogram> gathers, reductions;
  std::unique_ptr<QueuedCallTimes> by_device;  ///< times calls on a GPU; null on the CPU
};

/// The number of steps that were made, and their times.
struct TrainingTimes {
  void mark(UseTimes::Event event) const {
    if (uses) uses->mark(event);
  }

  std::int64_t attempts = 0;
  double communication_before = 0;
  std::chrono::steady_clock::time_point last_end;
  double last_seconds = 0;
  UseTimes* uses = nullptr;  ///< measurements of a StepProfiler, while one lives
  DataWait data;
  DataSeconds brought;               ///< this thread's seconds for data when the latest step ended
  std::optional<FlopCounter> flops;  ///< counts operations in the first step
  std::int64_t flop = 0;             ///< number of operations that `flops` counted
  double peak_tflops = 0;            ///< StepResult::peak_tflops
};

/// The second of an Engine's three parts. It has parameters, gradients and optimizer states, their memory, and the
/// objects that use them from the first forward to the end of a step. Members are destroyed last to first: watchers
/// before units, units before memory. A Training is set up by look_at_module, make_plan and set_up, in this order
/// (set_up.cc).
struct Training {
  /// `steps`: number of steps that training has made (ReplicaSync). The object refers to `job`.
  Training(Job& job, std::int64_t steps);
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  void look_at_module();
  /// `continues`: whether this Training continues from another one over the same module (Engine::State::planned_anew).
  /// It is collective.
  void make_plan(bool continues);
  /// `durable` is null if the strategy does not have the key "durable". It is collective.
  void set_up(DurableFiles* durable, bool continues);
  /// From now on, keys that the strategy leaves out have the defaults of this version
  /// (OptimizerConfig::defaults_version). A run that continues keeps the defaults with which it began. If a number
  /// changes, the step is made anew and the function returns true. Step::resume must follow. Call it between steps.
  bool use_defaults(std::int64_t version);
  void report_frozen_states() const;
  /// If parameters are copies that this rank pulls ("sync"), gives them the newest values. The module keeps these
  /// values when its Engine is destroyed. A failure is logged.
  void take_newest_values();
  /// Detaches parameters from the Engine. Sharded parameters refuse access from now on, and their shards are kept for
  /// the next Engine. Other parameters stay readable, in their memory or, if ranks shared that memory, in a private
  /// copy.
  void detach_parameters();
  enum class When : std::uint8_t { kNow, kAtMost };  ///< kAtMost: the largest amount since the last step
  /// Returns the allocated bytes: the plan's bytes, and the bytes that were needed beyond the plan.
  MemoryUse allocated(When when) const;

  // These functions check that a program may make a call now (expect.cc). They throw tessera::Error (64) if it may not.
  // `what` names the call.
  void expect_microbatch(const at::Tensor& loss, const MicrobatchInfo& info) const;
  void expect_step(bool partial) const;
  void expect_nothing() const;
  /// Throws between backward and step if backward has already updated units.
  void expect_not_updated(const char* what) const;
  /// Throws while parameters are averages.
  void expect_weights(const char* what) const;
  void warn_of_factor(const at::Tensor& loss);
  /// Throws if a program changed parameters in a way that is not allowed (ParameterChecks). A program may change them
  /// under Gathered(kWrite). This function waits for values that are still being brought. `may_unfreeze`: the call
  /// makes memory for frozen parameters.
  void expect_parameters(bool may_unfreeze = false);

  bool updates_in_backward() const { return plan.update().in_backward; }
  /// Returns which microbatches of the step under way this rank computes, if they are neighbours. Throws tessera::Error
  /// (64) if they are not neighbours.
  MicrobatchRun run_of_step() const;
  /// Returns the number of this rank's microbatches in a step: gradient_accumulation, unless microbatches are dealt.
  std::int64_t microbatches() const {
    return dealer ? dealer->order().count_of(job.mesh.rank()) : plan.wire().accumulation;
  }
  /// Returns the number of the microbatch that this rank computes next, among those of all ranks in the step
  /// (MicrobatchOrder).
  std::int64_t microbatch() const;
  // The next functions seed microbatches under "reproducible", and otherwise do nothing (microbatch_seed.cc).
  /// Takes the run's seed from LibTorch's generator: all ranks take the seed of rank 0. It is collective.
  void agree_on_seed();
  /// Takes the seed from LibTorch's generator. After a load, the generator of each rank has the state that the
  /// checkpoint keeps (generator_to_keep), so all ranks take the same seed.
  void take_seed();
  /// Takes the seed from `state`, a state of LibTorch's generator that a commit keeps (generator_to_keep). Ranks that
  /// are threads of one process have one generator, which each of them sets for its microbatches, so they cannot take
  /// the seed from there.
  void take_seed(const at::Tensor& state);
  /// Sets LibTorch's generator for the microbatch that comes next.
  void seed_microbatch() const;
  /// Returns the state of LibTorch's generator for checkpoints and commits. Under "reproducible" this state follows
  /// from the run's seed, so it is the same on all ranks.
  at::Tensor generator_to_keep() const;
  bool step_is_due() const { return claims ? !claims->next() : window.microbatch == microbatches(); }
  /// Releases all units that this rank has gathered, since their values will change.
  void drop_gathered();
  /// It is called when parameters have got new values. Graphs that were made before must not use them, and checks
  /// accept them.
  void accept_new_values();
  /// Sets the learning rate of a group, or of all parameters if `group` is null.
  void set_lr(const std::string* group, double lr);
  /// Sets another number of the update rule, for a group or for all parameters if `group` is null. `name`: the number's
  /// key in the strategy's "optimizer".
  void set_option(const std::string* group, const std::string& name, std::span<const double> numbers);
  /// Sets the length of an epoch (Engine::set_epoch_samples). It is collective.
  void set_epoch_samples(std::int64_t samples);
  /// Returns the numbers of the update rule by key, for a group, or for parameters in no group
  /// (FlatParameter::kNoGroup).
  std::map<std::string, std::vector<double>> options(std::size_t group) const;
  /// Returns the group's index in optimizer.groups. Throws tessera::Error (64) if there is none of this name.
  std::size_t index_of_group(const char* what, const std::string& group) const;

  /// `info`: the microbatch. Its weight is 0 if this rank has no batch.
  void begin_backward(const MicrobatchInfo& info);
  void end_backward(const at::Tensor& loss, const MicrobatchInfo& info);
  /// Returns whether another rank has made this microbatch already ("deal.backups"), so that it needs no backward. The
  /// next microbatch is then chosen. If none is left, the step's sums are made, which is collective.
  bool passes_over_microbatch();
  // These functions measure a step for "noise_scale", and otherwise do nothing (own_gradients.cc).
  bool measures_noise() const;
  /// It is called at the end of a microbatch that has a batch. `weight` is the microbatch's weight.
  void note_own_microbatch(double weight);
  /// It is called when all microbatches of the step have ended.
  void note_own_step();
  /// It is called when backward has ended. `ends`: whether the microbatch has ended too. `has_batch`: whether it had a
  /// batch, with a loss. Returns whether the microbatch counts; it does not if another rank has completed it first.
  bool end_round(bool ends, bool has_batch);
  /// Runs a microbatch on a rank without a batch. It repeats the collectives of this rank's last microbatch, or makes
  /// those that the other ranks announce.
  void run_nothing();
  /// Returns whether ranks also gather units in a microbatch. Otherwise they only sum gradients, in the agreed order.
  bool gathers_with_others() const { return gathering.residency && job.mesh.world_size() > 1; }
  /// Returns whether any rank has a batch for the next microbatch. If a rank without a batch cannot know the
  /// collectives that follow, the other ranks announce them (RoundMeeting). It is collective.
  bool any_rank_has_batch(bool own);
  StepResult take_step();
  /// Implements Engine::time_calls. `known`: the times that another Training of the same units has measured so far, or
  /// null.
  void time_calls(std::unique_ptr<CallLatencies> known = nullptr);
  void drop_microbatches();
  /// Makes an outer step now, if replicas may differ ("sync"). `what`: the call that needs it. It is collective over
  /// the mesh.
  void bring_replicas_together(const char* what);

  Job& job;
  /// It is called before training state changes, and waits for the commit under way. The code in engine/saving sets
  /// this function. It is collective if a commit is under way.
  std::function<void()> settle_commit;
  std::unique_ptr<Optimizer> optimizer;
  MeshAxes axes;  ///< axes of this rank's replica, if replicas train by themselves ("sync"); else axes of the mesh
  MemoryPlan plan;
  TrainingMemory memory;
  Footprint footprint;
  std::vector<std::unique_ptr<Unit>> units;
  ValuesInUse values;
  std::unique_ptr<CallLatencies> latencies;  ///< null if calls are not timed; the reducer and the gathering write it
  Gradients gradients;
  std::unique_ptr<Step> step;
  std::optional<MicrobatchDealer> dealer;  ///< set with "deal" by speed, on several ranks
  std::optional<BackupClaims> claims;      ///< set with "deal.backups", on several ranks
  ReplicaSync sync;
  Window window;
  Gathering gathering;
  std::shared_ptr<SavedActivations> activations;  ///< null if activations stay in memory
  FrozenStates frozen_states;                     ///< states of parameters that trained before and are frozen now
  TrainingTimes times;

 private:
  void deal_next_step();
  void follow_claims();
  void warn_of_data_not_dealt();
  void note_times(StepResult& result);
  void report_plan(bool continues) const;
  bool shares_memory() const;
  /// Creates `step`, with the optimizer's numbers from the strategy.
  void make_step();
  void set_up_gradients();
  void set_up_gathering();
  void expect_backward(const char* what) const;
  void expect_weight(const MicrobatchInfo& info) const;
  double communication_seconds() const;
  void forget_what_is_skipped(const StepResult& result);
  void note_activations();
  void note_offloaded_activations() const;
  void make_buffers_alike();
  void begin_next_step();
};

}  // namespace tessera
