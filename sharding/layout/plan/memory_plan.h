#pragma once

// See docs/glossary.md: dealt, placement, slot, tier, unit.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/even_spread.h"
#include "runtime/base/state_dtype.h"
#include "sharding/compress/method_layout.h"
#include "sharding/layout/chunks.h"
#include "sharding/layout/matrix_deal.h"
#include "sharding/layout/placement.h"
#include "sharding/layout/plan/microbatch_order.h"
#include "sharding/layout/plan/record_layout.h"
#include "sharding/layout/plan/record_traffic.h"
#include "sharding/layout/plan/step_program.h"
#include "sharding/layout/shapes.h"
#include "tessera/dtype.h"
#include "tessera/memory.h"
#include "tessera/strategy.h"

namespace tessera {

/// The places where gradients wait for their reduction.
enum class BucketMode {
  kInPlace,      ///< the gradient buffer itself: replicated fp32 gradients reduced once a step, or one rank
  kAccumulator,  ///< fp32 buffers of full size, one a unit: unsharded accumulation over microbatches
  kShared,       ///< a few bucket slots, which units use in turn
};

/// A second copy of sharded parameters (Strategy::secondary), on these ranks.
struct SecondaryCopy {
  int ranks = 0;  ///< neighbours on the shard axis that hold one copy together; 0: there is no second copy
  SecondaryForm form = SecondaryForm::kPlain;
  bool is_rounded() const { return ranks > 0 && form == SecondaryForm::kInt8; }
};

/// Where parameters, gradients and optimizer state lie: on which axes of which mesh they are cut, on which device, and
/// how many units are gathered at once.
struct PlannedPlacement : Placement {
  using Placement::operator=;  ///< takes the cuts of a strategy (placement_of) and leaves the ranks as they are
  MeshPosition mesh;
  /// A GPU trains. Reductions then run beside backward: each one may take a unit's time, whatever memory that costs.
  bool is_queued = false;
  std::int64_t prefetch = 1;
  /// Number of replicas that train by themselves, if there are outer steps; `mesh` is then the mesh of one
  /// replica.
  int replicas = 1;
  SecondaryCopy secondary = {};
};

/// The state that lies outside of memory, or is copied out of memory. OffloadConfig::paths are left out, since no size
/// depends on them.
struct PlannedTiers : OffloadConfig {
  using OffloadConfig::operator=;   ///< takes the tiers of a strategy and leaves the rest as it is
  bool copies_checkpoints = false;  ///< CheckpointConfig::async
  bool is_durable = false;          ///< DurableConfig
};

/// How the gradients of a step's microbatches become sums, and in which form values go between ranks.
struct PlannedWire {
  DType reduce = DType::kF32;
  std::int64_t accumulation = 1;  ///< MicrobatchOrder::each
  GradientSync sync = GradientSync::kEachMicrobatch;
  bool reproducible = false;  ///< Strategy::reproducible
  /// The most microbatches of a step that a rank may be dealt (MicrobatchOrder::longest); 0: `accumulation` on each.
  std::int64_t longest_run = 0;
  std::int64_t backups = 0, microbatches = 0;  ///< MicrobatchOrder::backups and total
  /// 2 if units cut modules (units.bucket_cap_mb), since two of them then get gradients by turns
  int filling_buckets = 1;
  /// Reductions over a network on some axis go on by themselves while ranks compute
  /// (Collectives::reduces_in_background).
  bool reduces_in_background = false;
  std::optional<std::int64_t> reductions_ahead;  ///< Strategy::reductions_ahead
  CompressionConfig compression = {};
  /// compression.gathers, where parameters go over a network: on the shard axis, and updated ones on the replicate
  /// axis. It may be lossy only for units in slots: what stays in memory is updated there.
  WireForm gathers = WireForm::kPlain, replica_gathers = WireForm::kPlain;
  /// Collectives::compressed_part of each axis's group; also 0 if `compression` does not change the axis.
  int compressed_shard_part = 0, compressed_replicate_part = 0;
};

/// What the optimizer keeps of each element, and what an update does after it has the sums.
struct PlannedUpdate {
  MasterKind master = MasterKind::kSplitBF16;
  StateFormats states = {StateDType::kF32, StateDType::kF32};  ///< formats of the optimizer's states
  /// formats of states in groups that are updated as matrices
  StateFormats matrix_states = {};
  MatrixWork matrix_work = {};
  bool in_backward = false;  ///< a unit is updated as soon as its gradients are summed (optimizer.in_backward)
  /// An update goes over all state twice (lamb, lars). The first pass only reads parameters. It also only reads states,
  /// unless `first_pass_moves_states` is true.
  bool twice = false, first_pass_moves_states = false;
  /// CheckConfig::values: all values are checked after each step. No size depends on it; only
  /// MemoryPlan::publishes_behind does.
  bool checks_values = false;
  SyncConfig outer = {};  ///< outer steps of replicas, or the rules of asynchronous ranks
};

/// Everything that decides how much memory a rank needs, and nothing else. The engine fills it from the strategy and
/// the module. A function that needs one part takes that part.
struct PlanInput {
  std::vector<UnitShape> units;  ///< the root unit comes first
  PlannedPlacement placement;
  PlannedTiers tiers;
  PlannedWire wire;
  PlannedUpdate update;
};

/// Returns the fraction of a state that is offloaded for certain, 0 to 1; 0 for tier "auto", which is not decided yet.
inline double share_below(const OffloadedState& state) {
  return state.tier == Tier::kNvme || state.tier == Tier::kHost ? state.fraction : 0.0;
}

/// Memory of one optimizer state of `numel` elements: its numbers, then its scales, each ending on a cache line. Large
/// pieces have such a length that the next piece does not begin a multiple of 128 MiB behind them: some processors are
/// slow at that distance.
struct StatePiece {
  std::int64_t data_bytes = 0, scale_bytes = 0;
  std::int64_t bytes() const { return data_bytes + scale_bytes; }
};
/// Returns the piece for `numel` elements in the format `dtype`.
StatePiece state_piece(StateDType dtype, std::int64_t numel);

/// fp32 elements that error feedback keeps for a group on each axis: as many as this rank rounds, up to a whole cache
/// line.
struct FeedbackNumel {
  std::int64_t shard = 0, replicate = 0;
};

/// The records (I/O blocks) that one tier of a rank has, for all of its groups.
struct RecordPool {
  std::int64_t records = 0;       ///< number of records; 0 where all state is in memory
  std::int64_t record_bytes = 0;  ///< size of the largest record
  std::int64_t cached = 0;        ///< number of records that stay in memory, for which the cache has room
  std::int64_t cached_first = 0;  ///< this many of the first records are cached before the others
  /// Pieces of memory for the records that are not cached: for those in use, for as many as are read ahead, and for as
  /// many as are written behind. After a step they hold the records that were used last, and the next step begins with
  /// those.
  std::int64_t slots = 0;
  /// Number of slots in use at once: one on the CPU, or those of a batch for tensor states; on a GPU as many as may be
  /// under way.
  std::int64_t held = 1;
  /// Pieces of a GPU's memory through which records go from its host's memory and back, one for each record in use. It
  /// is 0 on the CPU.
  std::int64_t device_slots = 0;
  /// Bytes of all records where they lie in pinned memory of the GPU's host (tier "host") and have no slots there.
  std::int64_t pinned_bytes = 0;
  /// Decides which records stay in memory.
  EvenSpread cache() const { return {records, cached, cached_first}; }
  /// Returns the bytes of memory of this process: the host's where a GPU trains.
  std::int64_t memory_bytes() const { return (cached + slots) * record_bytes + pinned_bytes; }
  std::int64_t device_bytes() const { return device_slots * record_bytes; }
};

/// The slots of units and the pieces of memory through which their parameters come, before units are used.
struct SlotPlan {
  /// Number of slots that sharded units share. The root unit has a slot of its own, since it is used first and last in
  /// both directions. There are no slots if nothing is gathered, or units are gathered in parameter memory
  /// (Placement::keep_gathered). If Placement::shared, the ranks of the shard axis share the slots.
  std::int64_t shared_slots = 0;
  std::int64_t slot_bytes = 0;  ///< bytes of a shared slot
  /// Bytes of records of parameters that a step copies to a GPU for gathers, from the second step on. Records in files
  /// go through pieces of host memory, one for the parts of each unit that may be on its way.
  std::int64_t uploaded_bytes = 0;
  std::int64_t upload_piece_bytes = 0;  ///< bytes of a piece
  std::int64_t upload_pieces() const { return upload_piece_bytes > 0 ? shared_slots + 1 : 0; }
};

/// The buffers in which gradients become sums, and how long a unit's reduction is under way.
struct SumPlan {
  BucketMode bucket_mode = BucketMode::kShared;
  std::int64_t shared_buckets = 0;  ///< number of buckets that units use in turn; the root unit has one more
  std::int64_t bucket_bytes = 0;    ///< bytes of a shared bucket
  /// How many units later a rank does its share of a unit's reduction (Work::advance). `end_lag` says how many
  /// units after the start the rank waits for the end. 0: it waits right after the start.
  ///
  /// - One host's CPU: the end is twice as late as the share, so that a rank may be that many units ahead of another
  ///   before it waits. If a lag of one unit costs two buckets, the lag is the longest whose buckets fit into 8 MiB,
  ///   and 3 at most.
  /// - Network: the end is one unit later, or as late as transports allow where that costs nothing.
  /// - GPU: the share is done at the start, and the end is one unit later. Sums that go on over the replicate axis
  ///   begin one unit later and end after one more unit, and so do sums that the host makes (MemoryPlan::SlotsOnHost).
  std::int64_t reduction_lag = 0, end_lag = 0;
  std::int64_t units_under_way() const { return end_lag + 1; }
  /// fp32 elements of scratch for one unit's reduction; every unit whose reduction may be under way has its own.
  std::int64_t scratch_numel = 0;
  /// Under "reproducible": the number of a unit's sums that wait at a time for other sums of the tree (SumCounter, on
  /// the rank with the most). They are sums of whole gradients if MemoryPlan::keeps_gradients() is true, else of this
  /// rank's part; the last place is then that of the total.
  int waiting_sums = 0;
  /// The number of partial sums of each gradient that a rank sends if a rank's run of microbatches is not one subtree
  /// of the tree over a step's microbatches (cuts_subtrees). All ranks send as many as the rank that has the most
  /// (blocks_of). It is 0 elsewhere.
  int block_sums = 0;
  /// Sums of blocks go in pieces through extra memory (BlockSums). A piece that one rank joins at a time has this many
  /// fp32 elements.
  std::int64_t block_piece_numel = 0;
  /// Number of places that units share for their sums if units are updated in backward, where no sum has a place for
  /// itself. The root unit has one more place. A unit takes its place when its reduction starts (with
  /// BucketMode::kInPlace when its first gradient comes), and gives it back when it is updated.
  std::int64_t shared_sums = 0;
  std::int64_t sum_bytes = 0;  ///< bytes of one of these shared places
  /// Number of fp32 elements of the notes that ranks send about a unit with its reduction. Every unit whose reduction
  /// may be under way has that many elements.
  std::int64_t notes_numel = 0;
  std::int64_t method_work_numel = 0;  ///< elements of the one scratch buffer of gradient methods for all groups
  /// fp32 elements that all groups keep from step to step on both axes. CompressionConfig::restore_skipped adds a copy
  /// of them.
  std::int64_t kept_gradient_numel = 0;
};

/// State that an update reads twice in groups of matrices. The first time comes before the new matrices are known.
/// Muon reads momenta then, and makes directions from them. Rules of whole tensors read masters then: offloaded masters
/// lie in records of parameters, or of masters and states.
struct FirstPass {
  bool parameters = false, states = false;
};

/// Elements for outer steps and asynchronous ones (SyncConfig). `part`: this rank's part of all masters. `states`:
/// outer weights and momentum, each as many elements as `part`; or the values that ranks pull, and with an adaptive
/// lambda the means of its squares (DelayCompensationConfig); or, on a rank of Hogwild that keeps all states itself,
/// the states of the other ranks' parts (MemoryCategory::kOptimizer). `largest`: the largest group, whole, on its way
/// over the replicate axis.
/// `sent`: with streaming_diloco this rank's part of the outer gradients of the largest fragment. `largest` and `sent`
/// count in kStaging.
struct OuterNumel {
  std::int64_t part = 0, states = 0, largest = 0, sent = 0;
  std::int64_t served = 0;  ///< elements of all shards that parameter servers own
  std::int64_t staging() const { return largest + sent; }
};

/// The memory with which the passes of an update work, and the part of an update that a GPU's host makes.
struct PassPlan {
  /// The parameters that are updated as whole matrices. The memory for their exchange (MemoryPlan::matrix_bytes) has
  /// buffers for messages first, then room to work in.
  MatrixDeal matrices;
  FirstPass first_pass;
  OuterNumel outer;
  /// Bytes for an fp32 copy of the weights of the largest group that has some of them offloaded: a GPU needs it under
  /// rules that use norms of weights. It is 0 otherwise.
  std::int64_t weight_copy_bytes = 0;
  bool steps_on_host = false;  ///< the CPU of the host updates a GPU's records where they lie (OffloadedStep::kCpu)
  HostStepBytes host_step;     ///< bytes that a step of that CPU copies
  /// Bytes of pinned host memory for gradients and parameters of groups with records, without groups that lie there in
  /// any case.
  std::int64_t host_copies_bytes = 0;
};

/// The records of everything that lies outside of memory, or is written there.
struct RecordPlan {
  RecordPool states;  ///< records of masters and states
  /// Records of parameters. Records of trainable groups come first, then those of frozen ones, both in unit order.
  RecordPool parameters;
  /// Records of tensor states. The records of one batch (MatrixBatch) are in use at once, while those of another batch
  /// are read ahead or written behind.
  RecordPool tensor_states;
  /// Records of sums of gradients, one for each unit that trains, in whole pages. The root unit's sums stay in memory,
  /// since they would need a slot of their own there anyway.
  RecordPool gradients;
  /// Records of the memory that a commit (DurableConfig) writes: this rank's parts of parameters, masters and states,
  /// one behind the other, then cached records. They are `image_bytes` in all.
  RecordPool image;
  std::int64_t image_bytes = 0;  ///< bytes of that memory
  /// Number of groups that keep their tensor states in memory; they are the first ones that have such states, counted
  /// in unit order. Each other group that has such states (the share of OffloadConfig::moments) has a record.
  std::int64_t tensor_states_in_memory = 0;
  std::int64_t tensor_states_of_a_batch = 0;  ///< the most records of tensor states that one batch has
  /// Returns the number of records of tensor states that are read ahead, or written behind.
  std::int64_t tensor_states_ahead() const { return std::min(tensor_states_of_a_batch, kMostQueueDepth); }
  /// The number of records of parameters, and of masters and states, that are read ahead; as many are written behind.
  /// It is OffloadConfig::queue_depth. If the strategy leaves that out, the number is kQueueDepth. Updates in backward
  /// make it the number of records of a unit, at most half of kMostQueueDepth: a user who has the memory may set more.
  std::int64_t queue_depth = kQueueDepth;
  /// Bytes of records of states and tensor states that all passes of a step copy to the GPU, and as many are copied
  /// back. It is 0 on the CPU, and where the host's CPU updates them.
  std::int64_t streamed_bytes = 0;
  /// Bytes that a step copies between a GPU's slots (RecordPool::device_slots) and records of gradients; zeros on the
  /// CPU.
  HostStepBytes gradient_copies;
  DiskUse disk;  ///< bytes of the files, and bytes that steps move to and from them
};

/// The exact memory plan of one rank (every rank's is equal, since shards are). The engine allocates exactly these
/// sizes, and compares what it allocated with them. It is immutable after construction; any thread may read it. It
/// consists of four plans: those of slots, sums, passes and records.
class MemoryPlan {
 public:
  /// The number of reductions that a transport can have under way at a time.
  static constexpr std::int64_t kMostUnderWay = 16;

  MemoryPlan() = default;
  explicit MemoryPlan(PlanInput input);

  /// Returns the input that the plan was made from. To plan for another input, make a plan from a changed copy of it.
  const PlanInput& input() const { return input_; }
  const std::vector<UnitShape>& units() const { return input_.units; }
  const PlannedPlacement& placement() const { return input_.placement; }
  const PlannedTiers& tiers() const { return input_.tiers; }
  const PlannedWire& wire() const { return input_.wire; }
  const PlannedUpdate& update() const { return input_.update; }
  const MemoryUse& use() const { return use_; }
  const SlotPlan& slots() const { return slots_; }
  const SumPlan& sums() const { return sums_; }
  const PassPlan& passes() const { return passes_; }
  const RecordPlan& records() const { return records_; }
  /// Returns whether some parameters, or all, lie in records. Units are then gathered from there, even where there is
  /// one rank.
  bool parameters_below() const;
  /// Returns whether the records of parameters lie in the memory of a GPU's host, where the GPU's kernels reach them.
  bool parameters_on_host() const { return records_.parameters.pinned_bytes > 0; }
  /// Returns whether sums of gradients lie in records from a unit's reduction to its update. They are made in the
  /// records' own memory, or on a GPU in slots of its memory.
  bool gradients_below() const { return input_.tiers.gradients != Tier::kMemory; }
  /// Returns whether units are gathered before they are used, because some rank does not have all of their parameters.
  bool gathers() const;
  /// Returns how often a step gathers unit `index`, from the second step on, where units are used in the order of their
  /// definition. The root unit has a slot of its own and is gathered once. The others take turns in the shared slots:
  /// the units that one direction left in them are found there by the next direction, which begins with them.
  std::int64_t gathers_in_step(std::size_t index) const;
  /// Returns whether ranks hold a second copy of the parameters (PlannedPlacement::secondary). The first gather of a
  /// unit in a step is then over the whole shard axis, and the others are between the ranks that hold a copy together.
  bool has_secondary() const {
    const bool has_units = input_.units.size() > 1 || input_.placement.secondary.is_rounded();
    return input_.placement.secondary.ranks > 0 && has_units && gathers() && !input_.placement.keep_gathered &&
           !input_.placement.shared;
  }
  /// Returns whether the second copy holds unit `index`. The root is gathered once in a step, so a plain copy of it
  /// would be read by nobody; a rounded one makes the values that the step computes with.
  bool secondary_holds(std::size_t index) const {
    return has_secondary() && (index > 0 || input_.placement.secondary.is_rounded());
  }
  /// Returns whether the second copy holds parameters of this dtype as int8 codes.
  bool rounds_secondary(DType dtype) const;
  /// Returns the bytes of this rank's part of a group's second copy, in whole cache lines. The second function returns
  /// the bytes for all groups of units that the copy holds (they count in MemoryCategory::kParameters). The third
  /// function returns those for the largest group's codes on their way to a slot (in kSlots).
  std::int64_t secondary_bytes_of(const GroupShape& group) const;
  std::int64_t secondary_bytes() const;
  std::int64_t secondary_codes_bytes() const;
  /// Returns whether a unit's gradients stay where they are until a microbatch's backward has ended: they accumulate
  /// there over microbatches, or join a tree (`sums_wait`).
  bool keeps_gradients() const;
  /// Return the fp32 elements of one of a unit's sums that wait (SumPlan::waiting_sums), and the bytes of all sums that
  /// wait.
  std::int64_t waiting_numel_of(const UnitShape& unit) const;
  /// The index of the first place for whole gradients of a microbatch of another rank that this rank repeats; these
  /// places follow those of its own run. There is one place for each such microbatch (MicrobatchOrder::backups).
  int first_backup() const { return sums_.waiting_sums - static_cast<int>(input_.wire.backups); }
  std::int64_t waiting_bytes() const;
  /// Returns whether each rank joins the blocks of the part that it keeps (SumPlan::block_sums), and no sum is sent on,
  /// since gradients are cut over all ranks.
  bool joins_own_parts() const { return input_.placement.gradients.shard && input_.placement.mesh.replicate_size == 1; }
  /// Returns the fp32 elements of the memory through which the pieces of blocks go (SumPlan::block_piece_numel).
  std::int64_t block_exchange_numel() const;
  /// Returns the bytes that a rank sends in a step: those of blocks, and those of joined sums that are sent to further
  /// ranks.
  std::int64_t block_bytes_of_step() const;
  /// The microbatches of a step.
  MicrobatchOrder order() const;
  /// Returns the bytes of one unit's whole bucket.
  std::int64_t bucket_bytes_of(const UnitShape& unit) const;
  /// Returns the dtype of gradients in buckets that units share: the wire's dtype, or fp32 if there is one rank, since
  /// nothing is sent then.
  DType bucket_dtype() const;

  /// Returns this rank's part of what the optimizer keeps of a group.
  Extent optimizer_part_of(const GroupShape& group) const {
    return owned(input_.placement.optimizer, input_.placement.mesh, group.layout.numel());
  }
  /// Returns the bytes of this rank's part of a unit's gradients, in fp32.
  std::int64_t sum_bytes_of(const UnitShape& unit) const;
  /// The digest's bits in the notes about a unit (SumPlan::notes_numel), behind a number for each trainable parameter
  /// and before a weight.
  static constexpr std::int64_t kDigestBits = 64;

  /// Formats of the states that the optimizer keeps for each element of a trainable group.
  const StateFormats& states_of(const GroupShape& group) const;
  /// Returns the bytes for the exchange of matrices.
  std::int64_t matrix_bytes() const {
    return (2 * passes_.matrices.exchange_numel() + passes_.matrices.work_numel() + own_masters_numel()) * 4;
  }
  /// Returns the part of matrix_bytes(), in fp32 elements, for masters of a batch that are not sent: rules of whole
  /// tensors that read masters in a first pass need it.
  std::int64_t own_masters_numel() const {
    const FirstPass& first = passes_.first_pass;
    const bool reads_masters = !input_.update.matrix_work.is_muon && (first.parameters || first.states);
    return reads_masters ? passes_.matrices.own_numel() : 0;
  }

  /// Returns this rank's part of a group's GroupShape::tensor_states, fp32 elements.
  Extent tensor_state_part_of(const GroupShape& group) const;
  /// Returns the bytes of a group's record of tensor states, in whole pages.
  std::int64_t tensor_state_record_bytes_of(const GroupShape& group) const;

  /// Returns the number of elements of error feedback on each axis; 0 where nothing is kept.
  FeedbackNumel feedback_numel_of(const GroupShape& group) const;
  /// Returns the layout of the GradientMethod that makes the sums of a trainable group (its memory is in
  /// MemoryCategory::kFeedback); empty if there is none.
  MethodLayout method_layout_of(const GroupShape& group) const;
  /// Pinned memory through which a GPU's compressed sums go, on one axis, since its host makes them: each reduction of
  /// a group that may be under way has a slot. On a GPU, this memory, error feedback and what methods keep are counted
  /// in MemoryCategory::kHostRecords.
  struct SlotsOnHost {
    std::int64_t slots = 0, slot_bytes = 0;
    std::int64_t bytes() const { return slots * slot_bytes; }
  };
  SlotsOnHost shard_sums_on_host() const;
  SlotsOnHost replicate_sums_on_host() const;
  /// Returns the pinned memory for outer gradients (SyncConfig) that replicas of GPUs compress. With streaming_diloco
  /// it has a slot for each group of a fragment; otherwise it has one slot, since the host waits for each sum.
  SlotsOnHost outer_sums_on_host() const;
  /// Returns the pinned memory for values that GPUs gather in another form (PlannedWire::gathers, replica_gathers): a
  /// slot for each group of the units gathered ahead, and of the unit in use. If more gathers are under way, the oldest
  /// ends first.
  SlotsOnHost gathers_on_host() const;
  SlotsOnHost replica_gathers_on_host() const;

  /// Returns how a trainable group's optimizer part is cut into records.
  RecordLayout records_of(const GroupShape& group) const;
  /// Returns how this rank's part of a group's parameters is cut; there are no records where parameters are in memory.
  Chunks parameter_chunks_of(const GroupShape& group) const;
  /// Returns the most records that one unit's update moves: records of parameters in files, or of masters and states.
  std::int64_t most_records_of_a_unit() const;
  /// The bytes of all parameter servers' shards together, and the bytes that a rank sends to servers and receives from
  /// them in a step that uses all parameters. Heads of messages, and the numbers behind them, are not counted. All are
  /// 0 where no servers own shards.
  struct ServedBytes {
    std::int64_t shards = 0, sent = 0, received = 0;
  };
  ServedBytes served_bytes() const;
  /// Returns whether every record has all that the optimizer keeps of its elements.
  bool has_whole_records() const;
  /// Returns whether updates go over all state twice (lamb, lars), or over whole matrices before they update elements.
  bool passes_twice() const { return input_.update.twice || !passes_.matrices.batches().empty(); }
  /// Returns whether the host's CPU could update the records: they are whole, no parameters lie in files, and units are
  /// updated after backward, in one pass.
  bool can_step_on_host() const {
    return has_whole_records() && (!parameters_below() || parameters_on_host()) && !input_.update.in_backward &&
           !passes_twice();
  }
  /// Returns whether masters of a group, or some of them, are offloaded, as masters or as parameters.
  bool weights_below(const GroupShape& group) const;
  bool has_masters_in_records(const GroupShape& group) const;
  bool has_masters_in_parameter_records(const GroupShape& group) const;
  /// Returns the bytes of a unit's record of sums of gradients, in whole pages; 0 where a unit has nothing to train.
  std::int64_t gradient_record_bytes_of(const UnitShape& unit) const;
  /// The number of records of gradients that are read ahead of the update, and the number that are written behind it.
  static constexpr std::int64_t kGradientsAhead = 1;
  /// Returns the bytes of a GPU's parameters in its host's memory that the kernels of an update write. The second
  /// number is the bytes that the kernels read of parameters that are masters, or half of a master.
  HostStepBytes updated_over_bus() const;
  /// Returns how many records of the image of a commit are written at once.
  std::int64_t image_queue_depth() const { return input_.tiers.queue_depth.value_or(kQueueDepth); }
  /// Returns the number of records in files, of all kinds; records of tier "host" do not count.
  std::int64_t records_on_disk() const;

  /// Returns whether updated values are published asynchronously, behind the update, and the next forward waits for
  /// them. That is so where ranks hold whole parameters that others update. It is not so if all values are checked
  /// after each step, since the check would have to wait for them. `gathers_in_background`: the shard axis's transport
  /// carries gathers by itself (Collectives::gathers_in_background).
  bool publishes_behind(bool gathers_in_background) const;
  /// Returns the inputs that decide the order of this plan's steps (step_programs).
  StepInput step_input(bool gathers_in_background) const;

  /// Returns a table with a row for each category: its bytes and its content. The last rows compare the total with 16
  /// bytes a parameter.
  std::string to_table() const;

 private:
  using Steps = std::span<const StepProgram>;  ///< programs that step_programs returns
  std::vector<const RecordPool*> pools_in_files() const;
  void plan_parameters();
  void plan_gradients();
  void plan_tree();
  void plan_sums();
  void plan_gradient_records(Steps steps);
  void plan_gradient_copies();
  /// Returns the elements of a group's sums over the shard axis that this rank gets.
  std::int64_t shard_sum_numel_of(const GroupShape& group) const {
    return owned({input_.placement.gradients.shard, false}, input_.placement.mesh, group.layout.numel()).numel;
  }
  bool updates_by_device(const UnitShape& unit) const;
  void plan_lag();
  std::int64_t most_ahead() const;
  std::int64_t bytes_ahead() const;
  void plan_first_pass();
  void plan_tensor_states(Steps steps);
  void plan_optimizer(Steps steps);
  void plan_weight_copy();
  void plan_parameter_records(Steps steps);
  void plan_checkpoint();
  void plan_activations();
  void plan_feedback();
  bool sums_on_host() const;
  std::int64_t reductions_under_way() const;
  void plan_image();
  void plan_outer();
  /// Memory for records that are cached in it; the first `first` records get it before the others.
  struct Cache {
    std::int64_t bytes = 0, first = 0;
  };
  RecordPool plan_pool(const std::vector<std::int64_t>& bytes, Cache cache, std::int64_t slots);
  RecordPool plan_streamed_pool(const std::vector<std::int64_t>& bytes, Cache cache);
  RecordPool plan_uploaded_pool(const std::vector<std::int64_t>& bytes, Cache cache);
  RecordPool plan_files_of_gpu(const std::vector<std::int64_t>& bytes, Cache cache, std::int64_t held,
                               std::int64_t more);
  std::int64_t parameter_bytes_below(const GroupShape& group) const;
  void plan_host_step();
  /// The first function returns whether records of masters and states lie in the memory of a GPU's host, and the second
  /// function whether the host's CPU updates them there.
  bool states_on_host() const;
  bool states_stay_on_host() const;
  VisitWork first_work() const;
  /// Returns the number of slots for one record in use, for `queue_depth` records that are read ahead, and for as many
  /// that are written behind.
  static std::int64_t slots_of(std::int64_t queue_depth) { return 2 * queue_depth + 1; }
  std::int64_t slots_of_queue() const { return slots_of(records_.queue_depth); }
  std::int64_t chosen_queue_depth() const;
  void count(Steps steps, RecordKind kind, const RecordList& records, const RecordPool& pool);

  PlanInput input_;
  MemoryUse use_;
  SlotPlan slots_;
  SumPlan sums_;
  PassPlan passes_;
  RecordPlan records_;
};

}  // namespace tessera
