#pragma once

// See docs/glossary.md: dealt, placement, tier, unit.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/compression_methods.h"
#include "tessera/dtype.h"
#include "tessera/optimizer_types.h"
#include "tessera/transports.h"

namespace tessera {

/// The ways in which parameters, gradients and optimizer state are spread over the ranks. docs/design.md has a table of
/// the strategies.
enum class ShardingStrategy {
  kNoShard,         ///< "NO_SHARD": everything replicated (stage 0, DDP)
  kShardOptimizer,  ///< "SHARD_OPTIMIZER": optimizer state sharded (stage 1)
  kShardGradients,  ///< "SHARD_GRADIENTS": gradients and optimizer state sharded (stage 2)
  kShardGradOp,     ///< "SHARD_GRAD_OP": parameters sharded too, but kept gathered from forward to backward (stage 3
                    ///< without regathering)
  kFullShard,       ///< "FULL_SHARD": everything sharded, gathered per unit (stage 3)
  kHybridShard,     ///< "HYBRID_SHARD": FULL_SHARD on the mesh's shard axis, replicated on the other axis
};

/// The ways in which the learning rate changes from step to step; with kManual, Engine::set_lr changes it.
/// docs/strategy.md has the formulas.
enum class LrScheduleType { kConstant, kLinear, kCosine, kOneCycle, kInverseSqrt, kWsd, kManual };

/// The ways in which a larger batch changes the learning rate.
enum class BatchScaling {
  kLinear,      ///< "linear": lr x (global batch / base_batch_size) (arXiv 1706.02677)
  kSquareRoot,  ///< "square_root": lr x sqrt(global batch / base_batch_size) (arXiv 1404.5997)
};

/// The mesh: replicate x shard = world size. 0 means that Tessera chooses. If only one of the two numbers is given, the
/// other follows from the world size. If neither is given, replicate is the number of hosts if the strategy is
/// HYBRID_SHARD or the placement is given by axes (PlacementConfig), and 1 otherwise.
struct MeshConfig {
  std::int64_t replicate = 0;  ///< number of replicas; 0: Tessera chooses it
  std::int64_t shard = 0;      ///< number of ranks that hold one copy of the state together; 0: Tessera chooses it
  // The same two axes, with the names that PlacementConfig uses. A strategy uses one of the two names for each axis.
  std::int64_t host = 0;  ///< same as `replicate`; 0: not given
  std::int64_t rank = 0;  ///< same as `shard`; 0: not given

  /// Returns the length of the replicate axis, by whichever name it was given; 0 means that Tessera chooses it.
  std::int64_t replicas() const { return host > 0 ? host : replicate; }
  /// Returns the length of the shard axis, by whichever name it was given; 0 means that Tessera chooses it.
  std::int64_t shards() const { return rank > 0 ? rank : shard; }
};

/// The axes of the mesh over which one kind of state is cut. All ranks of every other axis hold copies of the state.
struct CutAxes {
  bool host = false;  ///< "host": the axis of length MeshConfig::replicas()
  bool rank = false;  ///< "rank": the axis of length MeshConfig::shards()
  friend bool operator==(const CutAxes&, const CutAxes&) = default;
};

/// The placement of state, given by axes of the mesh. It replaces Strategy::strategy, whose names are rows of
/// docs/guide/placement.md. Either all three members are given, or none. A rank must hold the gradients for all of its
/// optimizer state, and the parameters for all of its gradients. Therefore `optimizer` has all axes of `gradients`, and
/// `gradients` has all axes of `parameters`. Units are gathered along one axis, so `parameters` are never cut over
/// "host".
struct PlacementConfig {
  std::optional<CutAxes> parameters = {}, gradients = {}, optimizer = {};  ///< axes over which each kind is cut
  /// Returns whether the strategy gives the placement by axes, and not by a name.
  bool is_given() const { return parameters || gradients || optimizer; }
};

/// The forms in which a second copy of sharded parameters is kept (SecondaryConfig).
enum class SecondaryForm {
  kNone,   ///< "none": there is no second copy
  kPlain,  ///< "plain": in the dtype of the parameters, so results do not change, only the source of gathers
  kInt8,   ///< "int8": one byte for each element, so a step computes with rounded parameters
};

/// A second copy of sharded parameters, which the ranks of a host hold together (hpZ of ZeRO++, arXiv 2306.10209; like
/// FSDP2's reshard_after_forward with an integer). The first gather of a unit after an update is over the whole shard
/// axis, and fills the copy. All later gathers of that step are inside the host.
struct SecondaryConfig {
  SecondaryForm form = SecondaryForm::kNone;  ///< form of the copy's elements
  std::int64_t ranks = 0;  ///< neighbouring ranks of the shard axis that hold a copy together; 0: the ranks of a host

  /// Returns whether there is a second copy.
  bool is_used() const { return form != SecondaryForm::kNone; }
};

/// The modules that become units. Parameters that are in no other unit belong to the root unit.
struct UnitsConfig {
  std::vector<std::string> classes;  ///< class names without namespace and "Impl", such as "Block"
  std::vector<std::string> modules;  ///< module paths such as "layers.0"
  std::int64_t min_numel = 0;        ///< above 0: the module is split, bottom-up, into units of at least this many
                                     ///< elements
  /// Patterns of names of parameters that the Engine leaves to the program. Each rank keeps these parameters whole, in
  /// their own dtype, and LibTorch makes their gradients on each rank separately. In all other respects the Engine
  /// treats them like buffers: they get rank 0's values at the start, and checkpoints hold them.
  std::vector<std::string> ignored;
  /// NO_SHARD: units are buckets of at most this many MiB; 0: one bucket for each parameter; no value: no buckets
  std::optional<double> bucket_cap_mb;
  double first_bucket_mb = 1.0;  ///< MiB of the bucket that backward completes first
};

/// Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2).
struct LossScaleConfig {
  bool dynamic = true;                  ///< true: the scale follows the rules below; false: it stays at `initial`
  double initial = 65536.0;             ///< the scale of the first step
  double growth_factor = 2.0;           ///< factor by which the scale grows
  double backoff_factor = 0.5;          ///< factor by which the scale is lowered after overflows
  std::int64_t growth_interval = 2000;  ///< number of finite steps in a row after which the scale grows
  std::int64_t hysteresis = 1;          ///< number of overflows in a row after which the scale is lowered
  double minimum = 1.0;                 ///< lower bound of the scale
};

/// The dtypes in which training computes, sends and stores numbers.
struct MixedPrecisionConfig {
  DType param = DType::kF32;                   ///< dtype of gathered parameters, and so of compute: fp32, bf16, fp16
  DType reduce = DType::kF32;                  ///< dtype of gradients on the wire; sums are always accumulated in fp32
  MasterKind master = MasterKind::kSplitBF16;  ///< form of the masters of bf16 parameters
  std::vector<std::string> keep_fp32 = {"BatchNorm"};  ///< module classes (prefix) whose parameters stay fp32
  LossScaleConfig loss_scale;                          ///< used when param is fp16
};

/// Parameters that are updated with their own learning rate and other numbers. A parameter belongs to the group if some
/// pattern of `match` matches its name or one of its aliases, and it has at most `max_dim` dimensions. Numbers that are
/// left out are taken from OptimizerConfig.
struct ParameterGroup {
  std::string name = {};                   ///< name for Engine::set_lr and messages; empty: none
  std::vector<std::string> match = {"*"};  ///< patterns of names such as "layers.3.bias"; `*` and `?` as in file names
  /// largest number of dimensions (1 selects biases and the weights of normalization layers); no value: any number
  std::optional<std::int64_t> max_dim = {};
  double lr_ratio = 1.0;  ///< the group's rate is the common rate times this factor
  /// the group's own numbers; eps and betas only for types that have them
  std::optional<double> weight_decay = {}, eps = {};
  std::optional<std::pair<double, double>> betas = {};  ///< (beta1, beta2)
  /// The rule for the group's matrices; only the types muon and own_matrix use it. kAdamW: AdamW updates the matrices.
  /// kMuon, kOwnMatrix: that rule updates the matrices and also the embeddings. No value: the rule of
  /// OptimizerConfig::type updates the matrices, and AdamW updates the embeddings.
  std::optional<OptimizerType> type = {};
  /// lamb and lars: whether the norms of a parameter adapt its rate. It is usually false for biases and the weights of
  /// normalization layers.
  bool layer_adaptation = true;
  friend bool operator==(const ParameterGroup&, const ParameterGroup&) = default;
};

/// A value of OptimizerConfig whose default depends on OptimizerConfig::type. A program gives a value by assigning one
/// (`config.lr = 0.1`). A value that was not given counts as left out. The default of the rule is then used
/// (fill_in_defaults).
template <class T>
class OrDefault {
 public:
  /// A value that the program gives.
  constexpr OrDefault(T value) : value_(value), is_given_(true) {}  // NOLINT: implicit, for `config.lr = 0.1`
  /// Returns a value that counts as left out; it is `value` until `fill_in`.
  static constexpr OrDefault left_out(T value) {
    OrDefault result(value);
    result.is_given_ = false;
    return result;
  }

  /// Returns the value. If the value was left out, it is a default: the default of adamw before the first call of
  /// fill_in_defaults, and then that of the OptimizerConfig::type at the latest call.
  constexpr operator T() const { return value_; }  // NOLINT: implicit, for use as a plain value
  /// Returns whether the program gave the value.
  constexpr bool is_given() const { return is_given_; }
  /// Sets the default of a value that was left out.
  constexpr void fill_in(T value) {
    if (!is_given_) value_ = value;
  }

 private:
  T value_;
  bool is_given_;
};

/// The factor by which a matrix's shape changes its rate. It is needed because orthogonal matrices of different shapes
/// have elements of different sizes.
enum class MuonLrAdjustment {
  /// 0.2 sqrt(max(rows, columns)): an update is then about as large as AdamW's (arXiv 2502.16982), so one rate fits
  /// both rules
  kMatchRmsAdamW,
  kOriginal,  ///< sqrt(max(1, rows / columns))
};

/// Muon (Jordan et al., 2024): the momentum of each matrix is replaced, approximately, by the nearest orthogonal
/// matrix. Muon updates parameters of two dimensions, except those of Embedding modules. AdamW updates all other
/// parameters, with OptimizerConfig's betas and eps. A group can choose another rule for its parameters
/// (ParameterGroup::type); models train best if AdamW updates the matrix of the output layer too.
struct MuonConfig {
  double momentum = 0.95;     ///< decay of the momentum
  bool nesterov = true;       ///< whether the update looks ahead by the momentum
  std::int64_t ns_steps = 5;  ///< Newton-Schulz iterations
  /// factor of each matrix's rate
  OrDefault<MuonLrAdjustment> adjust_lr = OrDefault<MuonLrAdjustment>::left_out(MuonLrAdjustment::kOriginal);
  DType ns_dtype = DType::kF32;  ///< dtype in which the iterations compute: kF32 or kBF16
};

/// Adafactor (Shazeer and Stern, arXiv 1804.04235) keeps only the sums of rows and columns of a matrix's second moment.
/// It has no first moment. A parameter's rate is min(lr, 1 / sqrt(step)) times the root mean square of its elements.
struct AdafactorConfig {
  double beta2_decay = -0.8;    ///< the second moment's decay at step t is 1 - t^beta2_decay
  double min_rms = 1e-3;        ///< smallest root mean square that is used for a parameter (the paper's epsilon 2)
  double clip_threshold = 1.0;  ///< largest root mean square of an update, before the rate (the paper's d)
};

/// The optimizer and its numbers. A number that is left out has the default of torch.optim's rule of the same name.
/// PyTorch has no lion, lamb and lars, so these have the defaults of timm. The types own and own_matrix have the
/// defaults of adamw. docs/strategy.md lists the defaults.
struct OptimizerConfig {
  static constexpr std::int64_t kDefaultsVersion = 2;  ///< version of this Tessera's defaults; 1 means those of 0.1

  OptimizerType type = OptimizerType::kAdamW;  ///< the update rule
  /// learning rate at the peak of the schedule
  OrDefault<double> lr = OrDefault<double>::left_out(1e-3);
  OrDefault<double> beta1 = OrDefault<double>::left_out(0.9);  ///< for adamw, adam, lion, muon, lamb, own_matrix
  /// decay of second moments (lion: of the momentum that it keeps); used by the same types as beta1
  OrDefault<double> beta2 = OrDefault<double>::left_out(0.999);
  /// for adamw, adam, adagrad, rmsprop, muon, lamb, lars, own_matrix
  OrDefault<double> eps = OrDefault<double>::left_out(1e-8);
  /// Weight decay. It is decoupled for adamw, lion, muon, lamb and adafactor. The program's rule decides how own and
  /// own_matrix use it; for other types it is added to the gradient.
  OrDefault<double> weight_decay = OrDefault<double>::left_out(0.01);
  double momentum = 0.0;                      ///< for sgd, rmsprop, lars
  double dampening = 0.0;                     ///< for sgd
  bool nesterov = false;                      ///< for sgd, lars
  double trust_coefficient = 1e-3;            ///< for lars
  double alpha = 0.99;                        ///< for rmsprop
  bool centered = false;                      ///< for rmsprop
  double lr_decay = 0.0;                      ///< for adagrad
  std::int64_t freeze_step = 0;               ///< adamw, adam: number of steps of a parameter after which its second
                                              ///< moments are frozen (optim/rules/adam.h); 0: never
  MuonConfig muon = {};                       ///< used by muon
  AdafactorConfig adafactor = {};             ///< used by adafactor
  StateDType state_dtype = StateDType::kF32;  ///< dtype of moments and momentum
  bool shard_over_world = false;  ///< whether HYBRID_SHARD shards optimizer state over all ranks ("shard_over")
  bool in_backward = false;       ///< whether a unit is updated as soon as its gradients are summed, while backward
                                  ///< runs
  std::vector<ParameterGroup> groups = {};  ///< groups with their own numbers; a parameter is in at most one group
  /// Version of the defaults for numbers that are left out. The Engine changes this version when it loads a checkpoint
  /// of a run that began with other defaults.
  std::int64_t defaults_version = kDefaultsVersion;
};

/// Sets each number that has no value to the default of the optimizer's type. The Engine and Strategy::from_json call
/// this function. A program needs it only to read numbers of a Strategy that it has made field by field.
void fill_in_defaults(OptimizerConfig& optimizer);

/// An exponential moving average of the master weights. The optimizer updates the average in its pass over the weights,
/// by average += (weight - average) * (1 - decay). The average begins as a copy of the weights after the first step, as
/// torch.optim.swa_utils.AveragedModel does. `Gathered(engine, Gathered::kEma)` makes it readable.
struct EmaConfig {
  double decay = 0.0;  ///< between 0 and 1; 0: no average
};

/// The schedule of the learning rate; docs/strategy.md has the formulas.
struct LrScheduleConfig {
  LrScheduleType type = LrScheduleType::kConstant;  ///< shape of the schedule
  std::int64_t warmup_steps = 0;                    ///< steps in which the rate rises to its peak
  std::int64_t total_steps = 0;      ///< length of the schedule; linear, cosine, one_cycle and wsd need it
  std::int64_t decay_steps = 0;      ///< wsd: length of the final decay
  double min_ratio = 0.0;            ///< lowest rate, as a fraction of optimizer.lr
  double initial_ratio = 0.04;       ///< one_cycle: rate at step 0, as a fraction of the peak
  double warmup_share = 0.3;         ///< one_cycle: fraction of total_steps in which the rate rises
  double warmup_from = 0.0;          ///< rate at step 0, as a fraction of the peak; 0: the fraction is
                                     ///< 1 / (warmup_steps + 1)
  std::int64_t base_batch_size = 0;  ///< above 0: the rate grows with the global batch; optimizer.lr is the rate for a
                                     ///< global batch of this size
  BatchScaling batch_scaling = BatchScaling::kLinear;  ///< how the rate grows with the batch
  // The rise of the rate may be counted in samples of all ranks instead of steps; the rest of the schedule still counts
  // steps. At most one of warmup_samples and warmup_epochs may be given.
  std::int64_t warmup_samples = 0;  ///< samples in which the rate rises to its peak
  double warmup_epochs = 0.0;       ///< epochs in which the rate rises to its peak
  std::int64_t epoch_samples = 0;   ///< samples of an epoch, over all ranks; 0: Engine::set_epoch_samples sets the
                                    ///< number
};

/// The limit of a rank's memory, and the allocator of tensors.
struct MemoryConfig {
  std::int64_t limit_bytes = 0;  ///< "limit": a plan with more bytes is refused; 0: no limit. The file may also say
                                 ///< "8GiB"
  bool tensor_heap = true;       ///< whether LibTorch allocates CPU tensors with malloc, from `init(strategy)` on
};

/// The place where a kind of training state lies.
enum class Tier {
  kMemory,  ///< "memory": memory of the device that trains
  kNvme,    ///< "nvme": files on a local disk
  /// "auto": as much is offloaded as memory.limit makes necessary; the plan shows how much. State is offloaded to files
  /// in `paths` or, without paths, to the memory of a GPU's host
  kAuto,
  kHost,  ///< "host": pinned memory of the host of the GPU that trains
};

/// The tier of a kind of state, and the fraction of the state that lies there.
struct OffloadedState {
  Tier tier = Tier::kMemory;  ///< the tier
  double fraction = 1.0;      ///< fraction of the elements that lie on the tier, 0 to 1; the other elements stay in
                              ///< memory
  friend bool operator==(const OffloadedState&, const OffloadedState&) = default;
};

/// The processor that updates the masters and moments in the memory of a GPU's host. Both give the same bits.
enum class OffloadedStep {
  kAuto,  ///< "auto": the processor that is faster in a measurement when the Engine is made; the log shows the results
  /// "cpu": the host's CPU. Sums of gradients are copied to the host, and new parameters to the GPU
  kCpu,
  kGpu,  ///< "gpu": each step copies the records to the GPU and back
};

/// The values of OffloadConfig::queue_depth that the plan chooses if the strategy gives none: the usual number, and the
/// largest number.
constexpr std::int64_t kQueueDepth = 8, kMostQueueDepth = 32;

/// Offloaded training state. It is private to the run: files have no names and disappear when the run ends, unless
/// steps are durable (DurableConfig).
struct OffloadConfig {
  OffloadedState parameters;       ///< parameters, from which units are gathered; only for FULL_SHARD, HYBRID_SHARD
  OffloadedState masters;          ///< the bits of fp32 masters that bf16 or fp16 parameters do not hold
  OffloadedState moments;          ///< optimizer states
  Tier gradients = Tier::kMemory;  ///< sums of gradients, from a unit's reduction to its update; kAuto is not allowed
  /// directories for tier "nvme"; records are spread over them in proportion to their speed
  std::vector<std::string> paths;
  std::int64_t record_bytes = 2 << 20;  ///< "record": bytes that one operation reads or writes
  std::int64_t cache_bytes = 0;         ///< "cache": bytes, on each rank, for records that stay in memory from step to
                                        ///< step
  /// Number of records that are read ahead, and also of records that are written in the background. No value: the plan
  /// chooses the number (RecordPlan::queue_depth).
  std::optional<std::int64_t> queue_depth;
  bool verify = false;                        ///< whether records are hashed when they are written, and compared when
                                              ///< they are read
  OffloadedStep step = OffloadedStep::kAuto;  ///< the processor that updates masters and moments on tier kHost
  /// The tier of the tensors that forward saves for backward: kMemory, kHost or kNvme.
  Tier activations = Tier::kMemory;
  std::int64_t activations_min_bytes = 1 << 20;  ///< "min": smaller saved tensors stay in memory

  /// Returns whether some training state is offloaded, or may be.
  bool is_used() const {
    return parameters.tier != Tier::kMemory || masters.tier != Tier::kMemory || moments.tier != Tier::kMemory ||
           gradients != Tier::kMemory;
  }
  /// Returns whether some state lies in files, or may.
  bool uses_files() const {
    const auto in_files = [](Tier tier) { return tier == Tier::kNvme || tier == Tier::kAuto; };
    return in_files(parameters.tier) || in_files(masters.tier) || in_files(moments.tier) || in_files(gradients) ||
           in_files(activations);
  }
};

/// The kind of memory that `nccl` uses for gathers: memory of LibTorch, or memory that is registered with NCCL.
enum class NcclBuffers { kPlain, kRegistered };

/// The communication between ranks, and its time limits.
struct CommConfig {
  TransportChoice transport = TransportChoice::kAuto;   ///< the transport
  NcclBuffers nccl_buffers = NcclBuffers::kRegistered;  ///< memory for transport kNccl
  double timeout_s = 600.0;                             ///< a collective that takes longer is an error
  double init_timeout_s = 300.0;                        ///< time limit of the rendezvous
  double outage_s = 9.0;                                ///< an outage of the network that lasts longer ends the job
  /// The choice of algorithms (ring, doubling, halving) for calls over gloo and mpi. Empty: three ranks or more that
  /// lie on several hosts measure their network when their first group is made, if that takes less than two seconds.
  /// Their calls of 16 KiB and more then use the algorithms that cost least by these measurements; all other calls are
  /// direct. kDirectNetwork: all calls are direct. kMeasuredNetwork: each group chooses by costs that it measures when
  /// it is made. Any other value is the path, on rank 0's host, of a file of such costs, which `tessera bench
  /// collectives --fit-file` writes.
  std::string network_fit = {};
  static constexpr const char* kMeasuredNetwork = "measured";  ///< the value of network_fit that makes groups measure
  static constexpr const char* kDirectNetwork = "direct";      ///< the value with which no group measures
};

/// Checks that cost time, for finding mistakes and broken machines.
struct CheckConfig {
  bool as_across_hosts = false;  ///< ranks of one host must also use units in the same order, as ranks on several hosts
                                 ///< must
  bool values = false;           ///< whether parameters are hashed, so that writes through raw pointers are found
  /// Steps between two comparisons of the state of which several ranks hold copies; 0: no comparisons.
  std::int64_t replica_hash_every = 0;
};

/// The reaction to a step whose loss is far above the losses of earlier steps.
enum class SpikeAction {
  kNone,      ///< the step is made as usual
  kSkip,      ///< "skip": all ranks skip the step
  kRollback,  ///< "rollback": the last checkpoint is loaded, and training continues with the next data
};

/// Loss spikes. A step's loss is a spike if it is above `factor` times the median loss of the last `window` steps that
/// were no spikes.
struct SpikeConfig {
  SpikeAction action = SpikeAction::kNone;  ///< the reaction to a spike
  double factor = 2.0;                      ///< a number above 1; a loss below 0 is an error
  std::int64_t window = 64;                 ///< number of steps in the window; there is no spike before so many steps
                                            ///< were made
};

/// The measurement of the noise of gradients (StepResult::noise_scale; docs/metrics.md).
struct NoiseScaleConfig {
  std::int64_t every = 0;  ///< steps between two measurements; 0: no measurements
  double smoothing = 0.9;  ///< weight of the old estimate in the new estimate after a measurement
};

/// The times at which gradients are reduced under gradient accumulation.
enum class GradientSync {
  kEachMicrobatch,  ///< reduced after every microbatch: needs the least memory
  kLastMicrobatch,  ///< accumulated unsharded in fp32, and reduced once in each step: needs the least communication
};

/// The places and times at which checkpoints are saved. save_checkpoint uses `async`; `tessera train` uses the other
/// fields, and other programs may read them.
struct CheckpointConfig {
  /// whether a save returns as soon as this rank's data are copied; a thread then writes the copy while training
  /// continues
  bool async = false;
  std::string dir = {};          ///< folder of checkpoints; empty: no checkpoints
  std::int64_t every_steps = 0;  ///< steps between two checkpoints; 0: not saved by steps
  double every_minutes = 0;      ///< minutes between two checkpoints; 0: not saved by time
  std::int64_t keep = 0;         ///< SaveOptions::keep
  std::int64_t failures = 0;  ///< number of failed saves in a row that are tolerated; one more ends training with the
                              ///< last error
};

/// Crash consistency without checkpoints: after every `every`-th step, everything that training needs to continue is on
/// disk, in one of two generations of files. A run that ended at any moment continues from the last such step, bit for
/// bit.
struct DurableConfig {
  std::int64_t every = 0;  ///< steps between two commits; 0: no commits
  std::string dir = {};    ///< a folder on a local disk, which only this run uses
};

/// The axes of the mesh on which gradients are compressed.
enum class CompressedAxes { kBoth, kReplicate, kShard };

/// Compression of gradients that are sent over a network. A rank's contribution is compressed once, and sums are made
/// in fp32. Data that ranks of one host exchange through shared memory is not compressed.
struct CompressionConfig {
  WireForm gradients = WireForm::kPlain;  ///< codec of the gradients that ranks send
  WireForm sums = WireForm::kPlain;       ///< codec of sums that ranks get from each other if gradients are not sharded
  WireForm gathers = WireForm::kPlain;    ///< codec of parameters in all-gathers over a network
  CompressedAxes axes = CompressedAxes::kBoth;  ///< axes of the mesh on which gradients are compressed
  bool error_feedback = false;    ///< whether a contribution's rounding error is added to the next step's contribution
  CompressionMethod method = {};  ///< method that sums gradients
  bool restore_skipped = false;   ///< whether a skipped step keeps the feedback from before the step
  std::int64_t start_step = 0;    ///< number of steps at the start that are made without `method`

  /// Returns whether a method other than "none" is set.
  bool has_method() const { return !std::holds_alternative<NoMethodConfig>(method); }
};

/// The methods by which the mesh.replicate replicas stay one model.
enum class SyncType {
  kEachStep,         ///< gradients are summed over replicas in every step
  kLocalSgd,         ///< replicas train by themselves, and their weights are averaged (arXiv 1805.09767)
  kPostLocalSgd,     ///< each_step at first, then local_sgd (arXiv 1808.07217)
  kDiloco,           ///< local_sgd with an outer optimizer, which steps along the mean movement (arXiv 2311.08105)
  kStreamingDiloco,  ///< diloco for one fragment (some of the units) at a time, during compute (arXiv 2501.18512)
  kAsynchronous,     ///< each rank applies its gradients to parameters that all ranks own together, without waiting
  kHogwild,          ///< as asynchronous, but in one copy of the parameters that all ranks share, without locks (arXiv
                     ///< 1106.5730)
  kBackups,          ///< a step sums only the gradients that come first, and drops later ones (arXiv 1604.00981)
};

/// The ways in which the age of a gradient changes the gradient. The age is the number of other ranks' updates of the
/// shard, since this rank pulled the values from which it computed the gradient.
enum class AgeScale {
  kNone,     ///< the age has no effect
  kInverse,  ///< the gradient is divided by 1 + its age (arXiv 1511.05950)
};

/// The sharing of optimizer states between ranks that share one copy of the parameters (SyncType::kHogwild).
enum class StateSharing : std::uint8_t {
  kOwn,     ///< each rank has all states for itself, computed from its own gradients
  kShared,  ///< one set of states, which the gradients of all ranks update
};

/// The processes that own the shards of asynchronous training.
enum class ShardOwners : std::uint8_t {
  kRanks,    ///< the ranks of one host, in memory that all of them map
  kServers,  ///< parameter servers, which compute nothing else (`tessera serve`); the ranks may be on several hosts
};

/// The correction of a gradient g for its delay: g + lambda * g * g * (w now - w when it was pulled) (DC-ASGD, arXiv
/// 1609.08326).
struct DelayCompensationConfig {
  double lambda = 0.0;  ///< 0: no correction
  /// Whether lambda is divided, element by element, by the square root of a running mean of g * g.
  bool adaptive = false;
  double decay = 0.95;  ///< weight of the old mean in the new running mean after an update
};

/// The way in which ranks train without waiting for each other (SyncConfig::is_asynchronous). Each rank is a replica,
/// unless `replica_ranks` is above 1.
struct AsynchronousConfig {
  /// Number of steps by which a rank may be ahead of the slowest rank (stale synchronous, arXiv 1312.7869). 0: the
  /// updates of a round are applied in rank order. No value: there is no bound.
  std::optional<std::int64_t> max_staleness = {};
  ShardOwners owners = ShardOwners::kRanks;  ///< used by asynchronous
  /// Whether workers may join and leave a run while it continues (Engine::take_step). Each worker is a job of one rank.
  /// The option is used with servers.
  bool elastic = false;
  /// Number of ranks, neighbours in the world, that are one replica: they step together, with the sum of their
  /// gradients; used with servers.
  std::int64_t replica_ranks = 1;
  /// factor of an old gradient
  AgeScale scale = AgeScale::kNone;
  StateSharing states = StateSharing::kOwn;  ///< used by hogwild
  /// correction of old gradients
  DelayCompensationConfig delay_compensation = {};
  std::string record_order = {};  ///< file to which the order of pushes and pulls is written; empty: none
  std::string play_order = {};    ///< file that record_order wrote, whose order this run repeats; empty: none
};

/// SGD with Nesterov momentum on outer gradients. An outer gradient is the weights after the last outer step minus the
/// mean of the replicas' weights.
struct OuterConfig {
  double lr = 0.7;        ///< outer learning rate
  double momentum = 0.9;  ///< outer momentum
};

/// The synchronisation of replicas. Replicas that make outer steps exchange no data between two outer steps.
struct SyncConfig {
  SyncType type = SyncType::kEachStep;  ///< the method by which replicas stay one model
  std::int64_t every = 0;               ///< steps between two outer steps; not for each_step
  std::int64_t start_step = 0;          ///< number of steps at the start that are made as with each_step; not for
                                        ///< each_step
  OuterConfig outer = {};               ///< used by diloco and streaming_diloco
  // The next three fields are for streaming_diloco.
  /// number of fragments; unit i belongs to fragment i modulo `fragments`, and each fragment is exchanged once in
  /// `every` steps
  std::int64_t fragments = 4;
  std::int64_t delay = 1;  ///< steps from sending a fragment's outer gradients to its new weights
  /// fraction of a replica's own weights in its new weights; the rest are the outer weights. 0: only the outer weights
  double mix = 0.5;
  AsynchronousConfig asynchronous = {};  ///< used by asynchronous and hogwild
  std::int64_t backups = 0;              ///< "count" of backups: number of ranks for whose gradients a step does not
                                         ///< wait

  /// Returns this configuration if it is in effect after `steps` steps, otherwise the configuration of "each_step".
  SyncConfig after(std::int64_t steps) const { return steps >= start_step ? *this : SyncConfig{}; }
  /// Returns whether replicas exchange weights at outer steps instead of gradients in each step.
  bool makes_outer_steps() const { return type != SyncType::kEachStep && !has_common_parameters(); }
  /// Returns whether each rank's gradients are applied separately, without waiting for other ranks.
  bool is_asynchronous() const { return type == SyncType::kAsynchronous || is_hogwild(); }
  /// Returns whether all ranks train parameters that they own together, and each rank runs forward and backward by
  /// itself.
  bool has_common_parameters() const { return is_asynchronous() || type == SyncType::kBackups; }
  /// Returns whether parameter servers own the shards.
  bool has_servers() const { return type == SyncType::kAsynchronous && asynchronous.owners == ShardOwners::kServers; }
  /// Returns whether workers may join and leave the run.
  bool is_elastic() const { return has_servers() && asynchronous.elastic; }
  /// Returns whether ranks read and write one copy of the parameters at the same time.
  bool is_hogwild() const { return type == SyncType::kHogwild; }
  /// Returns whether an outer optimizer computes the new weights.
  bool has_outer_optimizer() const { return type == SyncType::kDiloco || type == SyncType::kStreamingDiloco; }
};

/// The treatment of the module's buffers at the end of a step, before the next forward. Buffers are, for example,
/// running statistics, which each rank's forward writes.
enum class BufferBroadcast {
  kNone,          ///< each rank keeps its own values
  kFromRankZero,  ///< every rank gets rank 0's values
  kMean,          ///< floating-point buffers are averaged over the ranks; other buffers get rank 0's values
  /// running statistics of batch norms include each microbatch of the step, in the order of the microbatches' numbers
  kMicrobatchOrder,
};

/// Returns whether ranks send each other whole buffers.
constexpr bool sends_buffers(BufferBroadcast how) {
  return how == BufferBroadcast::kFromRankZero || how == BufferBroadcast::kMean;
}

/// Hashes of the results of steps, for comparison with the same steps on other machines (docs/reproducible.md).
struct RecordHashesConfig {
  std::int64_t every = 0;             ///< steps between two recorded steps; 0: none are recorded
  std::string file = "hashes.jsonl";  ///< the file that rank 0 writes
};

/// The ways in which the microbatches of a step are divided among the ranks.
enum class DealBy {
  kEven,   ///< each rank computes gradient_accumulation microbatches
  kSpeed,  ///< a rank computes a run of neighbouring microbatches, whose length depends on its measured speed
};

/// The microbatches that each rank computes (docs/guide/dealing.md).
struct DealConfig {
  DealBy by = DealBy::kEven;      ///< how microbatches are divided among the ranks
  std::int64_t window = 10;       ///< steps over which speeds are measured before microbatches are dealt anew
  std::int64_t longest = 0;       ///< largest number of microbatches that a rank gets in a step; 0: twice the number
                                  ///< that it has at first
  std::int64_t backups = 0;       ///< largest number of slower ranks' microbatches that a rank computes again in a step
  std::int64_t microbatches = 0;  ///< microbatches of a step on all ranks; 0: gradient_accumulation for each rank
};

/// The strategy file in memory. docs/strategy.md says what each key means and allows. A Strategy is a plain value:
/// copies are independent.
struct Strategy {
  ShardingStrategy strategy = ShardingStrategy::kFullShard;  ///< the way in which state is spread over the ranks
  MeshConfig mesh;                                           ///< replicas and shards
  UnitsConfig units;                                         ///< modules that are gathered together
  std::int64_t prefetch = 1;                                 ///< number of units that are gathered ahead of their use
  std::int64_t prefetch_bytes = 0;  ///< above 0: limit of the bytes that are gathered ahead (at least one unit); it
                                    ///< replaces `prefetch`
  /// Number of units whose reductions may be under way while other gradients are computed. No value: Tessera chooses
  /// the number (docs/strategy.md).
  std::optional<std::int64_t> reductions_ahead;
  bool host_sharing = true;  ///< whether ranks of one host hold one copy of sharded parameters together, and make no
                             ///< gathers
  /// Whether sums are made by a tree over a step's microbatches, so that any number of ranks gives the same bits
  /// (docs/reproducible.md).
  bool reproducible = false;
  MixedPrecisionConfig mixed_precision;                        ///< dtypes
  std::int64_t gradient_accumulation = 1;                      ///< number of microbatches in a step, on each rank
  GradientSync gradient_sync = GradientSync::kEachMicrobatch;  ///< when gradients are reduced
  double gradient_clipping = 0.0;                              ///< largest global 2-norm; 0: off
  double gradient_clip_value = 0.0;                            ///< largest magnitude of an element; 0: off
  OptimizerConfig optimizer;                                   ///< update rule and its numbers
  EmaConfig ema;                                               ///< average of the weights
  LrScheduleConfig lr_schedule;                                ///< learning rate over the steps
  MemoryConfig memory;                                         ///< limit and allocator of memory
  OffloadConfig offload;                                       ///< state outside of the training device's memory
  CommConfig comm;                                             ///< transport and time limits
  CheckConfig check;                                           ///< checks that cost time
  BufferBroadcast broadcast_buffers = BufferBroadcast::kNone;  ///< the treatment of the module's buffers at the end of
                                                               ///< a step
  CheckpointConfig checkpoint = {};                            ///< where and when checkpoints are saved
  /// forms in which gradients and parameters are sent
  CompressionConfig compression = {};
  SpikeConfig on_spike = {};              ///< the reaction to a spike of the loss
  DurableConfig durable = {};             ///< steps from which a run can continue after a kill
  SyncConfig sync = {};                   ///< the way in which replicas stay one model
  NoiseScaleConfig noise_scale = {};      ///< the measurement of the noise of gradients
  PlacementConfig placement = {};         ///< the placement of state by axes, which replaces `strategy`
  RecordHashesConfig record_hashes = {};  ///< hashes of the results of steps; used with `reproducible`
  DealConfig deal = {};                   ///< the division of microbatches among the ranks
  SecondaryConfig secondary = {};         ///< a second copy of sharded parameters inside a host

  /// Reads and checks a strategy file. Throws tessera::Error: 66 or 77 if the file cannot be read; 78 with *all* errors
  /// in the file, one on each line: `file:line:column: /json/pointer: what is wrong, what is allowed, did you mean`.
  static Strategy from_file(const std::filesystem::path& path);
  /// Reads and checks a strategy file's text. Messages call the file `name`.
  static Strategy from_json(const std::string& text, const std::string& name = "strategy");

  /// Returns the resolved strategy as JSON, with every key: the values that the run has really used.
  std::string to_json() const;
};

/// These functions return names as the strategy file spells them.
std::string name_of(ShardingStrategy strategy);
/// Returns a rule's name.
std::string name_of(OptimizerType type);
/// Returns the name of a dtype of optimizer state.
std::string name_of(StateDType dtype);
/// Returns the name of a schedule of the learning rate.
std::string name_of(LrScheduleType type);
/// Returns the name of a scaling of the rate with the batch.
std::string name_of(BatchScaling scaling);
/// Returns the name of a way to stay one model.
std::string name_of(SyncType type);

}  // namespace tessera
