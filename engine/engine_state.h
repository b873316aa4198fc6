#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/activations/saved_activations.h"
#include "engine/device/accelerator.h"
#include "engine/device/uploader.h"
#include "engine/job/mesh_shape.h"
#include "engine/memory/durable_files.h"
#include "engine/memory/frozen_states.h"
#include "engine/memory/make_plan.h"
#include "engine/memory/training_memory.h"
#include "engine/parameters/gradient_hooks.h"
#include "engine/parameters/parameter_checks.h"
#include "engine/round_meeting.h"
#include "engine/save_under_way.h"
#include "engine/step/agree/gradient_norm.h"
#include "engine/step/step.h"
#include "optim/optimizer.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/gather/op_watch.h"
#include "sharding/gather/publication.h"
#include "sharding/gather/residency.h"
#include "sharding/gather/use_times.h"
#include "sharding/reduce/reducer.h"
#include "sharding/round_log.h"
#include "tessera/engine.h"
#include "tessera/own_rules.h"

namespace tessera {

class OuterSteps;

/// What an Engine is made of. Members are destroyed last to first: watchers before units, units before memory.
struct Engine::State {
  /// `continues_after`: for planned_anew, the steps that training has made. They say whether outer steps are in effect
  /// (SyncConfig::start_step), and buffers stay as they are on each rank. Null: an Engine begins.
  State(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<Strategy> strategy, const Mesh& mesh,
        OwnRules own_rules, std::optional<std::int64_t> continues_after);
  ~State();
  /// A State over the same module, planned anew after `change`: it goes on with the values, optimizer states and counts of this one,
  /// which is of no more use. Between steps. Collective.
  /// `other`: a strategy with more groups of parameters, in place of the Engine's.
  std::unique_ptr<State> planned_anew(std::int64_t steps, const std::function<void()>& change,
                                      std::shared_ptr<Strategy> other = nullptr);
  /// Throws tessera::Error (64) where a program may not plan anew now. `what`: the call.
  void expect_may_plan_anew(const char* what) const;
  /// Plans `state` anew where outer steps begin or end with `steps`, and says whether it has. Between steps. Collective where it does.
  static bool follow_sync(std::unique_ptr<State>& state, std::int64_t steps);

  void look_at_module();
  MeshShape shape_of_mesh() const;
  void set_up();
  /// With the optimizer's numbers that the strategy has.
  void make_step();
  /// What the strategy leaves out has the defaults of this version from now on (OptimizerConfig::defaults_version): those that a run began
  /// with, when it goes on. Where a number changes, the step is made anew and true comes back: Step::resume must follow. Between steps.
  bool use_defaults(std::int64_t version);
  void check_transport() const;
  void report_plan() const;
  void report_frozen_states() const;
  /// What was allocated is what was planned, to the byte.
  void expect_plan() const;
  void detach_parameters();

  void expect_microbatch(const at::Tensor& loss, const MicrobatchInfo& info) const;
  void expect_step(bool is_due, bool partial) const;
  void expect_weight(const MicrobatchInfo& info) const;
  void warn_of_division(const at::Tensor& loss);
  /// Throws if a program did to parameters what it may not (ParameterChecks). Under Gathered(kWrite) it may. Waits for values that are
  /// on their way.
  /// `may_unfreeze`: the call makes memory for what was frozen.
  void expect_parameters(bool may_unfreeze = false) {
    if (open_writes > 0) return;
    if (publication) publication->finish();
    if (residency) residency->expect_values();
    checks->expect_accepted(may_unfreeze);
  }
  bool updates_in_backward() const { return plan.input().updates_in_backward; }
  /// Throws tessera::Error (64) between backward and step where backward has updated units already. `what`: the call.
  void expect_not_updated(const char* what) const;
  /// Throws tessera::Error (64) while parameters are averages.
  void expect_weights(const char* what) const;
  /// Parameters have other values than graphs and checks know.
  void accept_new_values();
  /// Before training state changes: waits for the commit under way, which counts then, or is taken back on all ranks; its failure is
  /// the next commit's. Collective where there is one.
  void settle_commit();
  /// Waits for the commit under way when the Engine goes, without the other ranks. A failure that nobody was told of is logged, and ends
  /// tessera::run with its exit code.
  void leave_commit();
  /// Of a group by name; of all, if it is null.
  void set_lr(const std::string* group, double lr);
  /// Likewise, by its key in the strategy's "optimizer".
  void set_option(const std::string* group, const std::string& name, std::span<const double> numbers);
  /// Those of a group, or of what is in none (FlatParameter::kNoGroup), by key.
  std::map<std::string, std::vector<double>> options(std::size_t group) const;
  /// Among optimizer.groups. Throws tessera::Error (64) if there is none of this name.
  std::size_t index_of_group(const char* what, const std::string& group) const;
  /// All of a backward but the backward itself.
  static std::vector<at::Tensor> factors_of(const std::vector<Engine*>& engines, const LossSeed& first);
  static void run_backward(const at::Tensor& loss, const std::vector<Engine*>& engines, const MicrobatchInfo& info);
  /// `weight`: of the microbatch.
  void begin_backward(double weight);
  void end_backward(const at::Tensor& loss, const MicrobatchInfo& info);
  /// Backward is over. `ends`: and so is the microbatch. `has_batch`: it was one, with a loss.
  void end_round(bool ends, bool has_batch);
  /// What any backward needs. `what`: the call.
  void expect_backward(const char* what) const;
  void expect_nothing() const;
  /// A microbatch of a rank without a batch: what the others do together, as the last microbatch here did it, or as they tell it now.
  void run_nothing();
  /// Whether what ranks do together in a microbatch is more than sums of gradients in the order agreed on.
  bool gathers_with_others() const { return residency && mesh.world_size() > 1; }
  /// Whether any rank has a batch, before a microbatch. Where a rank that has none cannot know what the others will do, these tell it
  /// (RoundMeeting). Collective.
  bool any_rank_has_batch(bool own);
  StepResult take_step();
  /// Where replicas may differ ("sync"), the outer step comes now. `what`: the call that needs it. Collective over the mesh.
  void bring_replicas_together(const char* what);
  /// Whether every rank's thread has ended, where a save goes on. Collective then.
  bool save_has_ended();
  void note_activations();
  void note_offloaded_activations() const;
  void begin_next_step();
  /// As strategy.broadcast_buffers says.
  void make_buffers_alike();
  void drop_microbatches();
  double communication_seconds() const;
  enum class When : std::uint8_t { kNow, kAtMost };  ///< at most: since the last step
  /// The plan's memory, and what was needed beyond it.
  MemoryUse allocated(When when) const;

  template <class Body>
  auto or_abort(const char* what, const Body& body);
  void fail(const absl::Status& reason);
  /// What ended the group, if an operator's exception only follows from it.
  [[noreturn]] void rethrow(const char* what);

  std::shared_ptr<torch::nn::Module> module;
  const std::shared_ptr<Strategy> given_strategy;  ///< lives as long as the Engine; changed by use_defaults alone
  const Strategy& strategy;
  const SyncConfig sync;  ///< the strategy's, where it is in effect
  const bool continues;   ///< another State's training
  Mesh mesh;
  int exceptions_at_start = std::uncaught_exceptions();
  bool failed = false;

  Accelerator accelerator;
  std::optional<Uploader> uploader;
  const OwnRules own_rules;
  std::unique_ptr<Optimizer> optimizer;
  MeshAxes axes;               ///< of this rank's replica, where replicas train by themselves ("sync"); else `whole`
  MeshAxes whole;              ///< of the mesh
  MeshPosition position;       ///< in `whole`
  bool shares_memory = false;  ///< the ranks of a shard group
  MemoryPlan plan;
  TrainingMemory memory;
  MemoryUse memory_use;                 ///< as allocated
  std::int64_t allocated_at_start = 0;  ///< on a GPU, by LibTorch's allocator, when set-up was over
  std::optional<std::int64_t> activation_bytes;
  std::vector<std::unique_ptr<Unit>> units;
  bool loaded = false;               ///< parameters have their values and places
  std::optional<GradientNorm> norm;  ///< on the CPU; a GPU's norm is a pass of its own
  std::optional<Reducer> reducer;
  std::optional<ParameterChecks> checks;
  std::optional<GradientHooks> hooks;
  std::optional<Publication> publication;  ///< where values are published behind the update
  std::unique_ptr<Step> step;
  std::unique_ptr<OuterSteps> outer;    ///< null where "sync" is not in effect
  std::optional<GatherLog> log;         ///< of this step
  RoundLog rounds;                      ///< of microbatches
  std::optional<RoundMeeting> meeting;  ///< of the next microbatch, on a rank without a batch
  std::unique_ptr<ShardSource> shards;  ///< null where no parameters lie below memory
  std::optional<Residency> residency;   ///< where parameters are sharded, or lie below memory
  std::optional<OpWatch> watch;
  std::shared_ptr<SavedActivations> activations;  ///< null where they stay in memory

  FrozenStates frozen_states;               ///< of what trained before
  bool has_looked_at_loss = false;          ///< warn_of_division
  bool half_loaded = false;                 ///< a load of a checkpoint failed after it had begun to write
  int open_guards = 0;                      ///< Gathered guards that live
  int open_writes = 0;                      ///< Gathered(kWrite) guards that live
  bool shows_ema = false;                   ///< parameters and their averages have changed places
  std::int64_t microbatch = 0;              ///< since the last step
  std::optional<double> microbatch_weight;  ///< of a microbatch that has more losses (MicrobatchInfo::retain_graph)
  std::int64_t attempts = 0;
  LocalStep local;
  double communication_before = 0;
  std::chrono::steady_clock::time_point last_step_end;
  double last_step_seconds = 0;
  UseTimes* use_times = nullptr;  ///< of a StepProfiler, while one lives

  std::shared_ptr<Collectives> save_group;  ///< of the thread that saves, where it may (CheckpointConfig::async)
  std::unique_ptr<SaveUnderWay> saving;     ///< the save under way, on all ranks or on none
  std::jthread removal;                     ///< of old checkpoints, beside training; rank 0's
  bool step_finishes_saves = true;          ///< a step that sees the end of a save throws its error
  /// What a spike goes back to (SpikeAction::kRollback).
  struct LastCheckpoint {
    std::string path;  ///< that was saved or loaded last; empty: none
    int returns = 0;   ///< to it
  };
  LastCheckpoint last_checkpoint;
  std::unique_ptr<DurableFiles> durable;  ///< null without "durable"
  absl::Status commit_failure;            ///< of the latest commit, until the program is told
};

/// Runs `body`; if it throws, the other ranks are told, so that none waits for this one. What comes out is the reason
/// that they are told, which is the first: an operator whose unit could not be gathered throws LibTorch's error, not
/// ours.
template <class Body>
auto Engine::State::or_abort(const char* what, const Body& body) {
  try {
    return body();
  } catch (const std::exception&) {
    rethrow(what);
  }
}

}  // namespace tessera
