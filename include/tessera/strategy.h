#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dtype.h"

namespace tessera {

/// How parameters, gradients and optimizer state are spread over the ranks. docs/design.md has a table of the
/// strategies.
enum class ShardingStrategy {
  kNoShard,         ///< "NO_SHARD": everything replicated (stage 0, DDP)
  kShardOptimizer,  ///< "SHARD_OPTIMIZER": optimizer state sharded (stage 1)
  kShardGradients,  ///< "SHARD_GRADIENTS": gradients and optimizer state sharded (stage 2)
  kShardGradOp,     ///< "SHARD_GRAD_OP": parameters sharded too, but kept gathered from forward to backward
  kFullShard,       ///< "FULL_SHARD": everything sharded, gathered per unit (stage 3)
  kHybridShard,     ///< "HYBRID_SHARD": FULL_SHARD on the mesh's shard axis, replicated on the other
};

// clang-format off
enum class OptimizerType {
  kAdamW, kAdam, kSgd, kLion, kAdagrad, kRmsprop, kMuon, kLamb, kLars, kAdafactor,
  kOwn,        ///< the program's ElementwiseOptimizer
  kOwnMatrix,  ///< the program's MatrixOptimizer for matrices, adamw for all else
};
// clang-format on
enum class LrScheduleType { kConstant, kLinear, kCosine, kOneCycle, kInverseSqrt, kWsd, kManual };

/// The mesh: replicate x shard = world size. 0 means "choose": replicate = hosts for HYBRID_SHARD, else 1.
struct MeshConfig {
  std::int64_t replicate = 0;
  std::int64_t shard = 0;
};

/// Which modules become units. What no unit claims belongs to the root unit.
struct UnitsConfig {
  std::vector<std::string> classes;  ///< class names without namespace and "Impl", such as "Block"
  std::vector<std::string> modules;  ///< module paths such as "layers.0"
  std::int64_t min_numel = 0;        ///< > 0: split bottom-up into units of at least this many elements
  /// Patterns of names of parameters that the Engine leaves to the program: on each rank they stay whole, in their own dtype, and their
  /// gradients are LibTorch's, this rank's alone. Else they are as buffers: rank 0's at the start, and in checkpoints.
  std::vector<std::string> ignored;
  std::optional<double> bucket_cap_mb;  ///< NO_SHARD: units are buckets of at most so many MiB; 0: one a parameter
  double first_bucket_mb = 1.0;         ///< MiB of the bucket that is complete first in backward
};

/// Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2).
struct LossScaleConfig {
  bool dynamic = true;
  double initial = 65536.0;
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;  ///< finite steps before the scale grows
  std::int64_t hysteresis = 1;          ///< overflows in a row tolerated before the scale falls
  double minimum = 1.0;
};

struct MixedPrecisionConfig {
  DType param = DType::kF32;                   ///< dtype of gathered parameters, and so of compute: fp32, bf16, fp16
  DType reduce = DType::kF32;                  ///< dtype of gradients on the wire; sums are always accumulated in fp32
  MasterKind master = MasterKind::kSplitBF16;  ///< of bf16 parameters: see MasterKind
  std::vector<std::string> keep_fp32 = {"BatchNorm"};  ///< module classes (prefix) whose parameters stay fp32
  LossScaleConfig loss_scale;                          ///< used when param is fp16
};

/// Parameters that are updated with other numbers than the rest: those with a name, one of their aliases included, that
/// some pattern of `match` fits, and of at most `max_dim` dimensions. What is not said is as in OptimizerConfig.
struct ParameterGroup {
  std::string name = {};                     ///< for Engine::set_lr and messages; empty: none
  std::vector<std::string> match = {"*"};    ///< of names such as "layers.3.bias"; `*` and `?` as in file names
  std::optional<std::int64_t> max_dim = {};  ///< 1: biases and the weights of norms
  double lr_ratio = 1.0;                     ///< the rate as a share of everybody's
  std::optional<double> weight_decay = {}, eps = {};  ///< eps and betas: of types that have them
  std::optional<std::pair<double, double>> betas = {};
  /// With optimizer type muon or own_matrix. kAdamW: its matrices are updated by AdamW; kMuon, kOwnMatrix: by that rule, embeddings too.
  /// Left out: by that rule, but embeddings by AdamW.
  std::optional<OptimizerType> type = {};
  /// lamb and lars: the norms of a parameter adapt its rate. Mostly false for biases and the weights of norms.
  bool layer_adaptation = true;
  friend bool operator==(const ParameterGroup&, const ParameterGroup&) = default;
};

/// A value of OptimizerConfig whose default depends on OptimizerConfig::type. A program gives it by assigning one. Until then it is left out:
/// the rule's own default stands for it (fill_in_defaults).
template <class T>
class OrDefault {
 public:
  constexpr OrDefault(T value) : value_(value), is_given_(true) {}  // NOLINT: so that `config.lr = 0.1` gives it
  static constexpr OrDefault left_out(T value) {
    OrDefault result(value);
    result.is_given_ = false;
    return result;
  }

  /// The value; where it is left out, the default of the type for which defaults were filled in last: at first that of adamw.
  constexpr operator T() const { return value_; }  // NOLINT: so that it is read as the value
  constexpr bool is_given() const { return is_given_; }
  constexpr void fill_in(T value) {
    if (!is_given_) value_ = value;
  }

 private:
  T value_;
  bool is_given_;
};

/// What a matrix's rate is multiplied by, since orthogonal matrices of all shapes have the same norm.
enum class MuonLrAdjustment {
  kMatchRmsAdamW,  ///< 0.2 sqrt(max(rows, columns)): a step is about as long as AdamW's (arXiv 2502.16982), so one rate fits both
  kOriginal,  ///< sqrt(max(1, rows / columns))
};

/// Muon (Jordan et al., 2024): the momentum of each matrix is replaced by about the nearest orthogonal matrix. It updates parameters of
/// two dimensions but those of Embedding modules; AdamW updates all others, with OptimizerConfig's betas and eps. Groups can say
/// otherwise (ParameterGroup::type); models are trained best where the matrix of the output layer has AdamW too.
struct MuonConfig {
  double momentum = 0.95;
  bool nesterov = true;
  std::int64_t ns_steps = 5;  ///< Newton-Schulz iterations
  OrDefault<MuonLrAdjustment> adjust_lr = OrDefault<MuonLrAdjustment>::left_out(MuonLrAdjustment::kOriginal);
  DType ns_dtype = DType::kF32;  ///< in which the iterations compute: kF32, kBF16
};

/// Adafactor (Shazeer and Stern, arXiv 1804.04235): of a matrix's second moment only the sums of its rows and columns are kept. There is
/// no first moment. A parameter's rate is min(lr, 1 / sqrt(step)) times the root mean square of its elements.
struct AdafactorConfig {
  double beta2_decay = -0.8;    ///< the second moment's decay at step t is 1 - t^beta2_decay
  double min_rms = 1e-3;        ///< a parameter's root mean square counts as at least this (the paper's epsilon 2)
  double clip_threshold = 1.0;  ///< largest root mean square of an update, before the rate (the paper's d)
};

/// What is left out is as torch.optim has it for the rule of this name. PyTorch has no lion, lamb and lars: theirs is as timm has it. own and
/// own_matrix have adamw's. docs/strategy.md lists the defaults.
struct OptimizerConfig {
  static constexpr std::int64_t kDefaultsVersion = 2;  ///< of the defaults of this version of Tessera. 1: those of 0.1

  OptimizerType type = OptimizerType::kAdamW;
  OrDefault<double> lr = OrDefault<double>::left_out(1e-3);
  OrDefault<double> beta1 = OrDefault<double>::left_out(0.9);    ///< adamw, adam, lion, muon, lamb
  OrDefault<double> beta2 = OrDefault<double>::left_out(0.999);  ///< likewise
  OrDefault<double> eps = OrDefault<double>::left_out(1e-8);     ///< adamw, adam, adagrad, rmsprop, muon, lamb, lars
  /// Decoupled for adamw, lion, muon, lamb and adafactor, else added to the gradient.
  OrDefault<double> weight_decay = OrDefault<double>::left_out(0.01);
  double momentum = 0.0;                      ///< sgd, rmsprop, lars
  double dampening = 0.0;                     ///< sgd
  bool nesterov = false;                      ///< sgd, lars
  double trust_coefficient = 1e-3;            ///< lars
  double alpha = 0.99;                        ///< rmsprop
  bool centered = false;                      ///< rmsprop
  double lr_decay = 0.0;                      ///< adagrad
  std::int64_t freeze_step = 0;               ///< adamw, adam: > 0: so many steps move second moments as usual
  MuonConfig muon = {};                       ///< muon
  AdafactorConfig adafactor = {};             ///< adafactor
  StateDType state_dtype = StateDType::kF32;  ///< of moments and momentum
  bool shard_over_world = false;  ///< "shard_over": "world": HYBRID_SHARD with optimizer state over all ranks
  bool in_backward = false;       ///< a unit is updated as soon as its gradients are summed, while backward runs
  std::vector<ParameterGroup> groups = {};  ///< each parameter is in one at most
  /// Whose defaults stand for what is left out. The Engine sets it where it loads a checkpoint of a run that began with earlier ones.
  std::int64_t defaults_version = kDefaultsVersion;
};

/// Gives what is left out the default of the optimizer's type. The Engine and Strategy::from_json do so; a program needs it only to read
/// numbers of a Strategy that it made field by field.
void fill_in_defaults(OptimizerConfig& optimizer);

/// An exponential moving average of the master weights, moved in the optimizer's pass: average += (weight - average) *
/// (1 - decay). It begins as a copy of the weights after the first step, as torch.optim.swa_utils.AveragedModel does.
/// `Gathered(engine, Gathered::kEma)` shows it.
struct EmaConfig {
  double decay = 0.0;  ///< 0: none
};

struct LrScheduleConfig {
  LrScheduleType type = LrScheduleType::kConstant;
  std::int64_t warmup_steps = 0;
  std::int64_t total_steps = 0;      ///< needed by linear, cosine, one_cycle and wsd
  std::int64_t decay_steps = 0;      ///< wsd: length of the final decay
  double min_ratio = 0.0;            ///< lowest rate as a share of optimizer.lr
  double initial_ratio = 0.04;       ///< one_cycle: rate at step 0 as a share of the peak
  double warmup_share = 0.3;         ///< one_cycle: share of total_steps spent rising
  std::int64_t base_batch_size = 0;  ///< > 0: linear scaling rule, lr x (global batch / this) (arXiv 1706.02677)
};

struct MemoryConfig {
  std::int64_t limit_bytes = 0;  ///< "limit": a plan above it is refused; 0: no limit. Accepts "8GiB" in the file
  bool tensor_heap = true;       ///< LibTorch's CPU tensors come from malloc: `init(strategy)` sees to it
};

/// Where a kind of training state lies.
enum class Tier {
  kMemory,  ///< "memory": that of the device which trains
  kNvme,    ///< "nvme": files on a local disk
  kAuto,    ///< "auto": below memory as far as memory.limit makes it necessary; the plan says how far. In files of
            ///< `paths`, or without them in the memory of a GPU's host
  kHost,    ///< "host": pinned memory of the host whose GPU trains
};

struct OffloadedState {
  Tier tier = Tier::kMemory;
  double fraction = 1.0;  ///< share of the elements that lie on the tier, 0 to 1; the others stay in memory
  friend bool operator==(const OffloadedState&, const OffloadedState&) = default;
};

/// Who updates a GPU's masters and moments that lie in its host's memory. Bits are the same.
enum class OffloadedStep {
  kAuto,  ///< "auto": who is faster by what is measured when the Engine is made; the log says it with the figures
  kCpu,   ///< "cpu": the host's CPU, where they lie. Sums of gradients come there, and new parameters go to the GPU
  kGpu,   ///< "gpu": each step brings their records to the GPU and takes them back
};

/// Of what moves, records that are read ahead, and as many that are written behind, where a strategy leaves it open: as a rule, and at most.
constexpr std::int64_t kQueueDepth = 8, kMostQueueDepth = 32;

/// Training state on tiers below memory. It is private to the run: files have no name and go with it, but where steps are durable
/// (DurableConfig).
struct OffloadConfig {
  OffloadedState parameters;            ///< with FULL_SHARD or HYBRID_SHARD; units are gathered from there
  OffloadedState masters;               ///< what fp32 masters have beside bf16 or fp16 parameters
  OffloadedState moments;               ///< optimizer states
  Tier gradients = Tier::kMemory;       ///< sums of gradients, from a unit's reduction to its update: not kAuto
  std::vector<std::string> paths;       ///< directories for tier "nvme"; records are spread over them, by their speed
  std::int64_t record_bytes = 2 << 20;  ///< "record": what is read and written with one operation
  std::int64_t cache_bytes = 0;         ///< "cache": memory of a rank for records that stay from step to step
  /// Records that are read ahead, and as many that are written behind. Where it is left out the plan chooses (MemoryPlan::queue_depth).
  std::optional<std::int64_t> queue_depth;
  bool verify = false;                        ///< records are hashed, and compared when they come back
  OffloadedStep step = OffloadedStep::kAuto;  ///< of masters and moments on tier kHost
  /// What forward keeps for backward: kMemory, kHost or kNvme.
  Tier activations = Tier::kMemory;
  std::int64_t activations_min_bytes = 1 << 20;  ///< "min": saved tensors smaller than this stay where they are

  /// Whether some training state lies below memory, or may.
  bool is_used() const {
    return parameters.tier != Tier::kMemory || masters.tier != Tier::kMemory || moments.tier != Tier::kMemory ||
           gradients != Tier::kMemory;
  }
  /// Whether something lies in files, or may.
  bool uses_files() const {
    const auto in_files = [](Tier tier) { return tier == Tier::kNvme || tier == Tier::kAuto; };
    return in_files(parameters.tier) || in_files(masters.tier) || in_files(moments.tier) || in_files(gradients) ||
           in_files(activations);
  }
};

enum class TransportChoice { kAuto, kHost, kGloo, kNccl, kCudaHost };

/// How the memory is made that `nccl` gathers from and into.
enum class NcclBuffers { kPlain, kRegistered };

struct CommConfig {
  TransportChoice transport = TransportChoice::kAuto;
  NcclBuffers nccl_buffers = NcclBuffers::kRegistered;
  double timeout_s = 600.0;       ///< a collective that takes longer is an error
  double init_timeout_s = 300.0;  ///< rendezvous
  /// How calls over gloo find their way (ring, doubling, halving): empty: directly; kMeasuredNetwork: by what each group's own calls
  /// were measured to cost when it was joined; else rank 0's file of such costs, which `tessera bench collectives --fit-file` writes.
  std::string network_fit = {};
  static constexpr const char* kMeasuredNetwork = "measured";
};

/// Checks that cost something, for finding mistakes and broken machines.
struct CheckConfig {
  bool as_across_hosts = false;  ///< on one host too, ranks must use units in the same order, as several hosts would
  bool values = false;           ///< parameters are hashed, so that writes through raw pointers are found
  /// Steps between two comparisons of what several ranks hold alike; 0: none
  std::int64_t replica_hash_every = 0;
};

/// What happens where a step's loss is far above those before it.
enum class SpikeAction {
  kNone,
  kSkip,      ///< "skip": the step is skipped, on all ranks
  kRollback,  ///< "rollback": the last checkpoint is loaded, and training goes on with the next data
};

/// Loss spikes. A step's loss is one where it is above `factor` times the median of the last `window` steps' losses.
struct SpikeConfig {
  SpikeAction action = SpikeAction::kNone;
  double factor = 2.0;       ///< above 1; the loss must be a positive number in all steps
  std::int64_t window = 64;  ///< steps; until as many have been made there is no spike
};

/// When gradients are reduced under gradient accumulation.
enum class GradientSync {
  kEachMicrobatch,  ///< reduced after every microbatch: least memory
  kLastMicrobatch,  ///< accumulated unsharded in fp32, reduced once: least communication
};

/// Where and how checkpoints are saved. `async` is for save_checkpoint; the others are what `tessera train` does, and what a program's
/// own loop may look up.
struct CheckpointConfig {
  bool async = false;  ///< it copies what this rank writes and returns; a thread writes the copy while training goes on
  std::string dir = {};          ///< the folder; empty: none
  std::int64_t every_steps = 0;  ///< a checkpoint after so many steps; 0: none
  double every_minutes = 0;      ///< and after so many minutes; 0: none
  std::int64_t keep = 0;         ///< SaveOptions::keep
  std::int64_t failures = 0;     ///< so many saves in a row may fail before training ends with the last one's error
};

/// Crash consistency without checkpoints: after each `every` steps all that training goes on from is on disk, at its place in one of two
/// generations of files, and a run that ended at any moment goes on from the last such step, bit for bit.
struct DurableConfig {
  std::int64_t every = 0;  ///< steps between two commits; 0: none
  std::string dir = {};    ///< a folder on a local disk, for this run alone
};

/// Which axes of the mesh send gradients in fewer bits.
enum class CompressedAxes { kBoth, kReplicate, kShard };

/// Gradients of one bit: their signs.
enum class SignForm {
  kNone,
  kMajority,  ///< "majority": ranks vote (signSGD with majority vote, arXiv 1810.05291)
  kFeedback,  ///< "feedback": times the mean magnitude, and what that lacks is kept (EF-signSGD, arXiv 1901.09847)
};

/// Gradients in fewer bits, where they go over a network: a rank's contribution is compressed once, sums are made in fp32.
/// What ranks of one host pass to each other through shared memory stays as it is.
struct CompressionConfig {
  WireForm gradients = WireForm::kPlain;  ///< what ranks send to be summed
  WireForm sums = WireForm::kPlain;       ///< sums that ranks get from each other, where gradients are not sharded
  WireForm gathers = WireForm::kPlain;    ///< parameters that ranks get from each other
  CompressedAxes axes = CompressedAxes::kBoth;
  bool error_feedback = false;  ///< what rounding took from a contribution is added to the next step's
  /// > 0: gradients of matrices go over the network as two factors of this rank (PowerSGD, arXiv 1905.13727)
  std::int64_t power_sgd_rank = 0;
  /// > 0: only this share of each unit's gradients goes over the network, those of largest magnitude (top-k)
  double top_k = 0;
  double top_k_momentum = 0;  ///< top_k: of the momentum that each rank sends instead of gradients (arXiv 1712.01887)
  /// > 0: only this share of each unit's gradients goes over the network, each step others, the same on all ranks (random-k)
  double random_k = 0;
  SignForm sign = SignForm::kNone;
  bool one_bit = false;          ///< one bit an element, for contributions and for sums, both with error feedback
  double one_bit_momentum = 0;   ///< one_bit: of the momentum that ranks send instead of gradients, as 1-bit Adam
  std::int64_t qsgd_levels = 0;  ///< > 0: so many levels of each run's norm, rounded stochastically (QSGD)
  bool terngrad = false;         ///< -1, 0 or 1 times each run's largest magnitude, rounded stochastically (TernGrad)
  std::int64_t seed = 0;         ///< of what random_k, qsgd_levels and terngrad draw
  bool restore_skipped = false;  ///< a step that is skipped gives back what was kept before it
  bool hook = false;             ///< a CommHook of the program's makes the sums (tessera/comm_hook.h)
  std::int64_t start_step = 0;   ///< of all of these but gradients and sums: so many steps are made without, first
};

/// How replicas (mesh.replicate of them) stay one model.
enum class SyncType {
  kEachStep,         ///< gradients are summed over replicas in every step
  kLocalSgd,         ///< replicas train by themselves, and their weights are averaged (arXiv 1805.09767)
  kPostLocalSgd,     ///< local_sgd, after some steps of each_step (arXiv 1808.07217)
  kDiloco,           ///< as local_sgd, and an outer optimizer steps along what they moved on average (arXiv 2311.08105)
  kStreamingDiloco,  ///< diloco, a fragment of the model at a time, beside compute (arXiv 2501.18512)
};

/// SGD with Nesterov momentum on outer gradients: the weights after the last outer step less the mean of those that replicas have now.
struct OuterConfig {
  double lr = 0.7;
  double momentum = 0.9;
};

/// Fewer meetings of replicas: between two outer steps nothing goes over the replicate axis.
struct SyncConfig {
  SyncType type = SyncType::kEachStep;
  std::int64_t every = 0;       ///< but each_step: steps from one outer step to the next
  std::int64_t start_step = 0;  ///< but each_step: so many steps are made as each_step makes them, first
  OuterConfig outer = {};       ///< diloco, streaming_diloco
  // streaming_diloco:
  std::int64_t fragments =
      4;                   ///< unit i is of fragment i modulo fragments; each has its own turn once in `every` steps
  std::int64_t delay = 1;  ///< steps from a fragment's outer gradients to its new weights
  double mix =
      0.5;  ///< of a replica's own weights in its new ones; the rest is of the outer weights. 0: outer weights alone

  /// This where it is in effect after `steps` steps, else what each_step is.
  SyncConfig after(std::int64_t steps) const { return steps >= start_step ? *this : SyncConfig{}; }
  bool makes_outer_steps() const { return type != SyncType::kEachStep; }
  bool has_outer_optimizer() const { return type == SyncType::kDiloco || type == SyncType::kStreamingDiloco; }
};

/// What a step does at its end, and so before the next one's first forward, with the module's buffers: running statistics
/// and the like, which each rank's forward writes.
enum class BufferBroadcast {
  kNone,          ///< each rank keeps its own
  kFromRankZero,  ///< every rank gets rank 0's
  kMean,          ///< floating-point buffers are averaged over the ranks; every rank gets rank 0's others
};

/// The strategy file, in memory. docs/strategy.md says what each key means and allows.
struct Strategy {
  ShardingStrategy strategy = ShardingStrategy::kFullShard;
  MeshConfig mesh;
  UnitsConfig units;
  std::int64_t prefetch = 1;  ///< units gathered ahead of use
  std::int64_t prefetch_bytes =
      0;  ///< above 0, in place of `prefetch`: as many units as hold so many bytes, and one at least
  /// Units whose reductions are under way while gradients of others are made; empty: as many as the transport has use for.
  std::optional<std::int64_t> reductions_ahead;
  bool host_sharing = true;  ///< ranks of one host hold one copy of sharded parameters together, and gather nothing
  MixedPrecisionConfig mixed_precision;
  std::int64_t gradient_accumulation = 1;  ///< microbatches a step
  GradientSync gradient_sync = GradientSync::kEachMicrobatch;
  double gradient_clipping = 0.0;    ///< largest global 2-norm; 0: off
  double gradient_clip_value = 0.0;  ///< largest magnitude of an element; 0: off
  OptimizerConfig optimizer;
  EmaConfig ema;
  LrScheduleConfig lr_schedule;
  MemoryConfig memory;
  OffloadConfig offload;
  CommConfig comm;
  CheckConfig check;
  BufferBroadcast broadcast_buffers = BufferBroadcast::kNone;
  CheckpointConfig checkpoint = {};
  CompressionConfig compression = {};
  SpikeConfig on_spike = {};
  DurableConfig durable = {};
  SyncConfig sync = {};

  /// Reads and checks a strategy file. Throws tessera::Error: 66 or 77 where there is none to read; 78 with *all* errors
  /// in the file, one a line: `file:line:column: /json/pointer: what is wrong, what is allowed, did you mean`.
  static Strategy from_file(const std::filesystem::path& path);
  /// The same for text; `name` stands for the file in messages.
  static Strategy from_json(const std::string& text, const std::string& name = "strategy");

  /// The resolved strategy as JSON, every key present: what the run really used.
  std::string to_json() const;
};

std::string name_of(ShardingStrategy strategy);
std::string name_of(OptimizerType type);
std::string name_of(StateDType dtype);
std::string name_of(LrScheduleType type);

}  // namespace tessera
