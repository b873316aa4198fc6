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

/// The memory in which gradients wait for their reduction.
enum class BucketMode {
  kInPlace,      ///< the gradient buffer itself: for replicated fp32 gradients that are reduced once in each step, or
                 ///< for one rank
  kAccumulator,  ///< fp32 buffers of full size, one for each unit: for unsharded accumulation over microbatches
  kShared,       ///< a few bucket slots, which units use one after another
};

/// A second copy of sharded parameters (Strategy::secondary), on these ranks.
struct SecondaryCopy {
  int ranks = 0;  ///< number of neighbours on the shard axis that hold one copy together; 0: there is no second copy
  SecondaryForm form = SecondaryForm::kPlain;
  bool is_rounded() const { return ranks > 0 && form == SecondaryForm::kInt8; }
};

/// The placement of parameters, gradients and optimizer state. It has the axes of the mesh over which they are cut, the
/// device, and the number of units that are gathered at once.
struct PlannedPlacement : Placement {
  using Placement::operator=;  ///< takes the cuts of a strategy (placement_of) and does not change the ranks
  MeshPosition mesh;
  /// Whether a GPU trains. Reductions then run during backward: each may take as long as a unit's backward, whatever
  /// memory that costs.
  bool is_queued = false;
  std::int64_t prefetch = 1;
  /// Number of replicas that train by themselves, if there are outer steps; `mesh` is in this case the mesh of one
  /// replica.
  int replicas = 1;
  SecondaryCopy secondary = {};
};

/// The state that is offloaded, or is copied to checkpoints or commits. OffloadConfig::paths are left out, since no
/// size depends on them.
struct PlannedTiers : OffloadConfig {
  using OffloadConfig::operator=;   ///< takes the tiers of a strategy and does not change the rest
  bool copies_checkpoints = false;  ///< CheckpointConfig::async
  bool is_durable = false;          ///< whether DurableConfig asks for commits
};

/// The way in which the gradients of a step's microbatches are summed, and the form in which values are sent between
/// ranks.
struct PlannedWire {
  DType reduce = DType::kF32;
  std::int64_t accumulation = 1;  ///< MicrobatchOrder::each
  GradientSync sync = GradientSync::kEachMicrobatch;
  bool reproducible = false;  ///< Strategy::reproducible
  /// Largest number of microbatches of a step that a rank may be dealt (MicrobatchOrder::longest); 0: each rank has
  /// `accumulation`.
  std::int64_t longest_run = 0;
  std::int64_t backups = 0, microbatches = 0;  ///< MicrobatchOrder::backups and total
  /// number of units that get gradients at the same time: 2 if units may cut modules (units.bucket_cap_mb), else 1
  int filling_buckets = 1;
  /// Whether reductions over a network, on some axis, run in the background while ranks compute
  /// (Collectives::reduces_in_background).
  bool reduces_in_background = false;
  std::optional<std::int64_t> reductions_ahead;  ///< Strategy::reductions_ahead
  CompressionConfig compression = {};
  /// compression.gathers, if parameters are sent over a network: on the shard axis, and for updated parameters on the
  /// replicate axis. The form may be lossy only for units in slots, since parameters that stay in memory are updated
  /// there.
  WireForm gathers = WireForm::kPlain, replica_gathers = WireForm::kPlain;
  /// Collectives::compressed_part of the group of each axis; 0 also if `compression` does not affect the axis.
  int compressed_shard_part = 0, compressed_replicate_part = 0;
};

/// The optimizer's states for each element, and the work of an update after it has the sums.
struct PlannedUpdate {
  MasterKind master = MasterKind::kSplitBF16;
  StateFormats states = {StateDType::kF32, StateDType::kF32};  ///< formats of the optimizer's states
  /// formats of states in groups that are updated as matrices
  StateFormats matrix_states = {};
  MatrixWork matrix_work = {};
  bool in_backward = false;  ///< whether a unit is updated as soon as its gradients are summed (optimizer.in_backward)
  /// `twice`: whether an update goes over all state twice (lamb, lars). The first pass then only reads parameters. It
  /// also only reads states, unless `first_pass_moves_states` is true.
  bool twice = false, first_pass_moves_states = false;
  /// CheckConfig::values: whether all values are checked after each step. No size depends on it, but
  /// MemoryPlan::publishes_behind does.
  bool checks_values = false;
  SyncConfig outer = {};  ///< outer steps of replicas, or the settings of asynchronous ranks
};

/// All inputs on which the memory of a rank depends, and nothing else. The engine fills it from the strategy and the
/// module. A function that needs only one member takes that member.
struct PlanInput {
  std::vector<UnitShape> units;  ///< the root unit comes first
  PlannedPlacement placement;
  PlannedTiers tiers;
  PlannedWire wire;
  PlannedUpdate update;
};

/// Returns the fraction of a state, 0 to 1, that is certainly offloaded. It is 0 for tier "auto", which is not decided
/// yet.
inline double share_below(const OffloadedState& state) {
  return state.tier == Tier::kNvme || state.tier == Tier::kHost ? state.fraction : 0.0;
}

/// Memory of one optimizer state of `numel` elements: its numbers, then its scales; both end at the end of a cache
/// line. Some processors are slow if pieces begin at distances that are multiples of 128 MiB. The length of large
/// pieces is chosen to avoid this.
struct StatePiece {
  std::int64_t data_bytes = 0, scale_bytes = 0;
  std::int64_t bytes() const { return data_bytes + scale_bytes; }
};
/// Returns the piece for `numel` elements in the format `dtype`.
StatePiece state_piece(StateDType dtype, std::int64_t numel);

/// The number of fp32 elements that error feedback keeps for a group on each axis: those that this rank compresses,
/// filled up to whole cache lines.
struct FeedbackNumel {
  std::int64_t shard = 0, replicate = 0;
};

/// The records (I/O blocks) of one kind of state, for all groups of a rank.
struct RecordPool {
  std::int64_t records = 0;       ///< number of records; 0 if all state is in memory
  std::int64_t record_bytes = 0;  ///< size of the largest record
  std::int64_t cached = 0;        ///< number of records that stay in memory, in the cache
  std::int64_t cached_first = 0;  ///< this many records, from the first on, are cached before the others
  /// Number of pieces of memory for records that are not cached. They hold the records in use, those that are read
  /// ahead, and those that are written in the background. After a step they hold the records that were used last, and
  /// the next step begins with these.
  std::int64_t slots = 0;
  /// Largest number of slots in use at the same time. On the CPU it is one. For tensor states it is the number of
  /// records of a batch. On a GPU it is the number of records that may be under way.
  std::int64_t held = 1;
  /// Number of pieces of a GPU's memory to which records are copied from its host's memory, and from which they are
  /// copied back. There is one piece for each record in use. It is 0 on the CPU.
  std::int64_t device_slots = 0;
  /// Bytes of all records, if they lie in pinned memory of the GPU's host (tier "host"). These records have no slots
  /// there.
  std::int64_t pinned_bytes = 0;
  /// Returns the records that stay in memory.
  EvenSpread cache() const { return {records, cached, cached_first}; }
  /// Returns the bytes of memory of this process; if a GPU trains, this is memory of its host.
  std::int64_t memory_bytes() const { return (cached + slots) * record_bytes + pinned_bytes; }
  std::int64_t device_bytes() const { return device_slots * record_bytes; }
};

/// The slots of units, and the pieces of memory through which offloaded parameters are copied to slots.
struct SlotPlan {
  /// Number of slots that sharded units share. The root unit has a separate slot, since it is used first and last in
  /// both directions. There are no slots if nothing is gathered, or units are gathered in parameter memory
  /// (Placement::keep_gathered). If Placement::shared, the ranks of the shard axis share the slots.
  std::int64_t shared_slots = 0;
  std::int64_t slot_bytes = 0;  ///< bytes of a shared slot
  /// Bytes of records of parameters that a step copies to a GPU for gathers, from the second step on. Records in files
  /// are copied through pieces of host memory; there is one piece for the parts of each unit that may be under way.
  std::int64_t uploaded_bytes = 0;
  std::int64_t upload_piece_bytes = 0;  ///< bytes of a piece
  std::int64_t upload_pieces() const { return upload_piece_bytes > 0 ? shared_slots + 1 : 0; }
};

/// The buffers in which gradients are summed, and the time for which a unit's reduction is under way.
struct SumPlan {
  BucketMode bucket_mode = BucketMode::kShared;
  std::int64_t shared_buckets = 0;  ///< number of buckets that units share; the root unit has one more
  std::int64_t bucket_bytes = 0;    ///< bytes of a shared bucket
  /// `reduction_lag`: the number of units after which a rank does its share of a unit's reduction (Work::advance).
  /// `end_lag`: the number of units, from the start of the reduction, after which the rank waits for its end; with 0 it
  /// waits directly after the start.
  ///
  /// - CPU, one host: `end_lag` is twice `reduction_lag`, so that a rank may be that many units ahead of another rank
  ///   before it waits. If a lag of one unit costs two buckets, the lag is the longest whose buckets fit into 8 MiB,
  ///   and 3 at most.
  /// - Network: the end is one unit later, or as late as transports allow if that costs no memory.
  /// - GPU: the share is done at the start, and the end is one unit later. Sums over the replicate axis begin one unit
  ///   later and end after one more unit. The same is true for sums that the host makes (MemoryPlan::SlotsOnHost).
  std::int64_t reduction_lag = 0, end_lag = 0;
  std::int64_t units_under_way() const { return end_lag + 1; }
  /// Number of fp32 elements of scratch for one unit's reduction; every unit whose reduction may be under way has
  /// separate scratch.
  std::int64_t scratch_numel = 0;
  /// Under "reproducible": the number of a unit's sums that may wait for other sums of the tree at one time, on the
  /// rank with the most (SumCounter). If MemoryPlan::keeps_gradients() is true, they are sums of whole gradients.
  /// Otherwise they are sums of this rank's part, and the last place is that of the total.
  int waiting_sums = 0;
  /// The number of partial sums that a rank sends for each gradient, if its microbatches are not a subtree of the tree
  /// over a step's microbatches (cuts_subtrees). Otherwise it is 0. All ranks send as many sums as the rank that has
  /// the most (blocks_of).
  int block_sums = 0;
  /// Sums of blocks are exchanged in pieces, through extra memory (BlockSums). This is the number of fp32 elements of a
  /// piece that one rank joins at a time.
  std::int64_t block_piece_numel = 0;
  /// Number of places that units share for their sums if units are updated in backward. Sums have no memory of their
  /// own in this case. The root unit has one more place. A unit takes its place when its reduction starts (with
  /// BucketMode::kInPlace, when its first gradient arrives), and gives it back when it is updated.
  std::int64_t shared_sums = 0;
  std::int64_t sum_bytes = 0;  ///< bytes of one of these shared places
  /// Number of fp32 elements of the notes that ranks send about a unit with its reduction. Every unit whose reduction
  /// may be under way has that many elements.
  std::int64_t notes_numel = 0;
  std::int64_t method_work_numel = 0;  ///< number of elements of gradient methods' scratch, which all groups share
  /// Number of fp32 elements that all groups keep from step to step, on both axes. CompressionConfig::restore_skipped
  /// adds a copy of these elements.
  std::int64_t kept_gradient_numel = 0;
};

/// State that an update reads twice in groups of matrices. The first pass comes before the new matrices are known.
/// Muon's first pass reads momenta and computes directions from them. The first pass of rules of whole tensors reads
/// masters; offloaded masters lie in records of parameters, or of masters and states.
struct FirstPass {
  bool parameters = false, states = false;
};

/// Numbers of elements for outer steps and asynchronous steps (SyncConfig). `part`: this rank's part of all masters.
/// `states`: with outer steps, outer weights and momentum, each with as many elements as `part`. With asynchronous
/// steps, the values that ranks pull and, with an adaptive lambda, the means of squares (DelayCompensationConfig). A
/// rank of Hogwild that keeps all states itself also has the states of the other ranks' parts here
/// (MemoryCategory::kOptimizer). `largest`: the largest group, whole, while it is sent over the replicate axis. `sent`:
/// with streaming_diloco, this rank's part of the outer gradients of the largest fragment. `largest` and `sent` are
/// counted in kStaging.
struct OuterNumel {
  std::int64_t part = 0, states = 0, largest = 0, sent = 0;
  std::int64_t served = 0;  ///< number of elements of all shards that parameter servers own
  /// If ranks have common parameters: bytes of the values and states of this rank's shards, or of its states alone if
  /// servers own the shards. They lie in memory of the host: kOptimizer, or kHostRecords if a GPU trains.
  std::int64_t shard_bytes = 0;
  std::int64_t copied_bytes = 0;  ///< bytes of the copies of a GPU's values and gradients (HostCopies; kHostRecords)
  std::int64_t staging() const { return largest + sent; }
};

/// The memory with which the passes of an update work, and the part of an update that a GPU's host makes.
struct PassPlan {
  /// The parameters that are updated as whole matrices. The memory for their exchange (MemoryPlan::matrix_bytes) has
  /// first the buffers for messages, and then scratch.
  MatrixDeal matrices;
  FirstPass first_pass;
  OuterNumel outer;
  /// Bytes for an fp32 copy of the weights of the largest group with offloaded weights. A GPU needs this copy for rules
  /// that use norms of weights; otherwise it is 0.
  std::int64_t weight_copy_bytes = 0;
  bool steps_on_host = false;  ///< whether the host's CPU updates a GPU's records where they lie (OffloadedStep::kCpu)
  HostStepBytes host_step;     ///< bytes that a step copies for the updates by that CPU
  /// Bytes of pinned host memory for copies of gradients and parameters, for groups with records. Groups whose
  /// gradients or parameters lie in host memory anyway are not counted.
  std::int64_t host_copies_bytes = 0;
};

/// The records of all state that is offloaded, or that commits write.
struct RecordPlan {
  RecordPool states;  ///< records of masters and states
  /// Records of parameters. Records of trainable groups come first, then those of frozen groups, both in unit order.
  RecordPool parameters;
  /// Records of tensor states. The records of one batch (MatrixBatch) are in use at once, while those of another batch
  /// are read ahead or written behind.
  RecordPool tensor_states;
  /// Records of sums of gradients, one for each unit that trains, in whole pages. The root unit's sums stay in memory,
  /// since they would need a separate slot there anyway.
  RecordPool gradients;
  /// Records of the memory that a commit (DurableConfig) writes: this rank's parts of parameters, masters and states,
  /// then residuals, and then cached and pinned records. Together they have `image_bytes` bytes.
  RecordPool image;
  std::int64_t image_bytes = 0;  ///< bytes of that memory
  /// Number of groups that keep their tensor states in memory. These are the first groups with tensor states, in unit
  /// order. Each other group with tensor states has a record (OffloadConfig::moments gives the fraction).
  std::int64_t tensor_states_in_memory = 0;
  std::int64_t tensor_states_of_a_batch = 0;  ///< largest number of records of tensor states that a batch has
  /// Returns the number of records of tensor states that are read ahead, or written behind.
  std::int64_t tensor_states_ahead() const { return std::min(tensor_states_of_a_batch, kMostQueueDepth); }
  /// This many records of parameters are read ahead, and this many are written in the background. The same number holds
  /// for records of masters and states. It is OffloadConfig::queue_depth. If the strategy leaves that out, the number
  /// is kQueueDepth. If units are updated in backward, and no GPU brings offloaded parameters, it is instead the number
  /// of records of a unit, but at least kQueueDepth and at most half of kMostQueueDepth. A user who has the memory may
  /// set a larger number.
  std::int64_t queue_depth = kQueueDepth;
  /// Bytes of records of states and tensor states that all passes of a step copy to the GPU; the same number is copied
  /// back. It is 0 on the CPU, and if the host's CPU updates these records.
  std::int64_t streamed_bytes = 0;
  /// Bytes that a step copies between a GPU's slots (RecordPool::device_slots) and records of gradients; zeros on the
  /// CPU.
  HostStepBytes gradient_copies;
  DiskUse disk;  ///< bytes of the files, and bytes that steps read from and write to them
};

/// The exact memory plan of one rank. It is the same for all ranks, since shards have equal sizes. The engine allocates
/// exactly these sizes, and compares the allocated sizes with them. The plan is immutable after construction, and any
/// thread may read it. It consists of four plans: for slots, sums, passes and records.
class MemoryPlan {
 public:
  /// The number of reductions that a transport can have under way at a time.
  static constexpr std::int64_t kMostUnderWay = 16;

  MemoryPlan() = default;
  explicit MemoryPlan(PlanInput input);

  /// Returns the input from which the plan was made. To plan for another input, make a plan from a changed copy of this
  /// input.
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
  /// Returns whether some or all parameters lie in records. If they do, units are gathered from records, even if there
  /// is only one rank.
  bool parameters_below() const;
  /// Returns whether the records of parameters lie in the memory of a GPU's host, where the GPU's kernels reach them.
  bool parameters_on_host() const { return records_.parameters.pinned_bytes > 0; }
  /// Returns whether sums of gradients lie in records from a unit's reduction to its update. The sums are made in the
  /// records' own memory or, on a GPU, in slots of the GPU's memory.
  bool gradients_below() const { return input_.tiers.gradients != Tier::kMemory; }
  /// Returns whether units are gathered before they are used, because some rank does not have all of their parameters.
  bool gathers() const;
  /// Returns how often a step gathers unit `index`, from the second step on, if units are used in the order of their
  /// definition. The root unit has a separate slot and is gathered once. The other units use the shared slots one after
  /// another. The units that are in the slots at the end of one direction are used first in the next direction, and
  /// need not be gathered again.
  std::int64_t gathers_in_step(std::size_t index) const;
  /// Returns whether ranks hold a second copy of the parameters (PlannedPlacement::secondary). The first gather of a
  /// unit in a step is then over the whole shard axis. Later gathers are between the ranks that hold a copy together.
  bool has_secondary() const {
    const bool has_units = input_.units.size() > 1 || input_.placement.secondary.is_rounded();
    return input_.placement.secondary.ranks > 0 && has_units && gathers() && !input_.placement.keep_gathered &&
           !input_.placement.shared;
  }
  /// Returns whether the second copy holds unit `index`. The root unit is gathered once in a step, so a plain copy of
  /// it would never be read. A rounded copy, however, provides the values with which the step computes.
  bool secondary_holds(std::size_t index) const {
    return has_secondary() && (index > 0 || input_.placement.secondary.is_rounded());
  }
  /// Returns whether the second copy holds parameters of this dtype as int8 codes.
  bool rounds_secondary(DType dtype) const;
  /// The first function returns the bytes of this rank's part of a group's second copy, in whole cache lines. The
  /// second function returns the bytes for all groups of units that the copy holds (MemoryCategory::kParameters). The
  /// third function returns the bytes of the largest group's codes while they are gathered into a slot (kSlots).
  std::int64_t secondary_bytes_of(const GroupShape& group) const;
  std::int64_t secondary_bytes() const;
  std::int64_t secondary_codes_bytes() const;
  /// Returns whether a unit's gradients stay in place until a microbatch's backward has ended. That is so if they
  /// accumulate there over microbatches, or join a tree (`sums_wait`).
  bool keeps_gradients() const;
  /// Some sums wait for other sums of the tree (SumPlan::waiting_sums). `waiting_numel_of` returns the number of fp32
  /// elements of one such sum of a unit, and `waiting_bytes` the number of bytes of all these sums.
  std::int64_t waiting_numel_of(const UnitShape& unit) const;
  /// Returns the index of the first place for the whole gradients of other ranks' microbatches that this rank computes.
  /// There is one place for each such microbatch (MicrobatchOrder::backups). These places follow those of this rank's
  /// own run.
  int first_backup() const { return sums_.waiting_sums - static_cast<int>(input_.wire.backups); }
  std::int64_t waiting_bytes() const;
  /// Returns whether gradients are cut over all ranks. Each rank then adds up the block sums (SumPlan::block_sums) of
  /// the part that it keeps, and need not send the result to other ranks.
  bool joins_own_parts() const { return input_.placement.gradients.shard && input_.placement.mesh.replicate_size == 1; }
  /// Returns the fp32 elements of the memory through which the pieces of blocks go (SumPlan::block_piece_numel).
  std::int64_t block_exchange_numel() const;
  /// Returns the bytes that a rank sends in a step: the bytes of block sums, and those of joined sums that are sent to
  /// other ranks.
  std::int64_t block_bytes_of_step() const;
  /// Returns the order of a step's microbatches.
  MicrobatchOrder order() const;
  /// Returns the bytes of one unit's whole bucket.
  std::int64_t bucket_bytes_of(const UnitShape& unit) const;
  /// Returns the dtype of gradients in buckets that units share: the wire's dtype, or fp32 if there is one rank, which
  /// sends nothing.
  DType bucket_dtype() const;

  /// Returns the part of a group for which this rank keeps the optimizer's values.
  Extent optimizer_part_of(const GroupShape& group) const {
    return owned(input_.placement.optimizer, input_.placement.mesh, group.layout.numel());
  }
  /// Returns the bytes of this rank's part of a unit's gradients, in fp32.
  std::int64_t sum_bytes_of(const UnitShape& unit) const;
  /// The number of bits of the digest in the notes about a unit (SumPlan::notes_numel). In the notes these bits stand
  /// behind a number for each trainable parameter, and before a weight.
  static constexpr std::int64_t kDigestBits = 64;

  /// Returns the formats of the states that the optimizer keeps for each element of a trainable group.
  const StateFormats& states_of(const GroupShape& group) const;
  /// Returns the bytes for the exchange of matrices.
  std::int64_t matrix_bytes() const {
    return (2 * passes_.matrices.exchange_numel() + passes_.matrices.work_numel() + own_masters_numel()) * 4;
  }
  /// Returns the part of matrix_bytes(), in fp32 elements, for masters of a batch that are not sent. It is needed for
  /// rules of whole tensors that read masters in a first pass.
  std::int64_t own_masters_numel() const {
    const FirstPass& first = passes_.first_pass;
    const bool reads_masters = !input_.update.matrix_work.is_muon && (first.parameters || first.states);
    return reads_masters ? passes_.matrices.own_numel() : 0;
  }

  /// Returns this rank's part of a group's GroupShape::tensor_states, as an extent of fp32 elements.
  Extent tensor_state_part_of(const GroupShape& group) const;
  /// Returns the bytes of a group's record of tensor states, in whole pages.
  std::int64_t tensor_state_record_bytes_of(const GroupShape& group) const;

  /// Returns the number of elements of error feedback on each axis; 0 if the axis has no error feedback.
  FeedbackNumel feedback_numel_of(const GroupShape& group) const;
  /// Returns the layout of the GradientMethod that makes the sums of a trainable group (its memory is in
  /// MemoryCategory::kFeedback); empty if there is none.
  MethodLayout method_layout_of(const GroupShape& group) const;
  /// Pinned memory for a GPU's compressed sums on one axis, which its host makes. Each reduction of a group that may be
  /// under way has a slot. On a GPU, this memory, error feedback and the memory of methods are counted in
  /// MemoryCategory::kHostRecords.
  struct SlotsOnHost {
    std::int64_t slots = 0, slot_bytes = 0;
    std::int64_t bytes() const { return slots * slot_bytes; }
  };
  SlotsOnHost shard_sums_on_host() const;
  SlotsOnHost replicate_sums_on_host() const;
  /// Returns the pinned memory for outer gradients (SyncConfig) that replicas of GPUs compress. With streaming_diloco
  /// it has a slot for each group of a fragment; otherwise it has one slot, since the host waits for each sum.
  SlotsOnHost outer_sums_on_host() const;
  /// Returns the pinned memory for values that GPUs gather in another form (PlannedWire::gathers, replica_gathers). It
  /// has a slot for each group of the units that are gathered ahead, and of the unit in use. If more gathers are to be
  /// under way, the oldest gather is completed first.
  SlotsOnHost gathers_on_host() const;
  SlotsOnHost replica_gathers_on_host() const;

  /// Returns how a trainable group's optimizer part is cut into records.
  RecordLayout records_of(const GroupShape& group) const;
  /// Returns how this rank's part of a group's parameters is cut into chunks. No chunk has a record if parameters are
  /// in memory.
  Chunks parameter_chunks_of(const GroupShape& group) const;
  /// Returns the largest number of records that one unit's update moves: records of parameters in files, or of masters
  /// and states.
  std::int64_t most_records_of_a_unit() const;
  /// The bytes of all parameter servers' shards together, and the bytes that a rank sends to servers and receives from
  /// them in a step that uses all parameters. The headers of messages, and the numbers that follow headers, are not
  /// counted. All numbers are 0 if no servers own shards.
  struct ServedBytes {
    std::int64_t shards = 0, sent = 0, received = 0;
  };
  ServedBytes served_bytes() const;
  /// Returns whether every record has all masters and states of its elements.
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
  /// Returns the bytes of a unit's record of sums of gradients, in whole pages; 0 if the unit has nothing to train.
  std::int64_t gradient_record_bytes_of(const UnitShape& unit) const;
  /// The number of records of gradients that are read ahead of the update, and also the number that are written after
  /// it in the background.
  static constexpr std::int64_t kGradientsAhead = 1;
  /// Returns two numbers of bytes, for a GPU's parameters that lie in its host's memory: the bytes that the kernels of
  /// an update write, and the bytes that they read. They read only parameters that are masters or halves of masters.
  HostStepBytes updated_over_bus() const;
  /// Returns the number of records of the image of a commit that are written at once.
  std::int64_t image_queue_depth() const { return input_.tiers.queue_depth.value_or(kQueueDepth); }
  /// Returns the number of records in files, of all kinds; records of tier "host" are not counted.
  std::int64_t records_on_disk() const;

  /// Returns whether updated values are published asynchronously after the update, so that the next forward waits for
  /// them. That is so on the CPU if ranks hold whole parameters that other ranks of the shard axis update, and if there
  /// are no outer steps. It is not so if all values are checked after each step, since the check would have to wait for
  /// them. `gathers_in_background`: whether the shard axis's transport makes gathers in the background
  /// (Collectives::gathers_in_background).
  bool publishes_behind(bool gathers_in_background) const;
  /// Returns the inputs that decide the order of this plan's steps (step_programs).
  StepInput step_input(bool gathers_in_background) const;

  /// Returns a table with a row for each category: its bytes and its content. The last rows compare the total with 16
  /// bytes for each parameter.
  std::string to_table() const;

 private:
  using Steps = std::span<const StepProgram>;  ///< the programs that step_programs returns
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
  void plan_shards(std::int64_t numel);
  /// Memory for cached records. The first `first` records are cached before the others.
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
  /// The first function returns whether records of masters and states lie in the memory of a GPU's host. The second
  /// function returns whether the host's CPU updates them there.
  bool states_on_host() const;
  bool states_stay_on_host() const;
  VisitWork first_work() const;
  /// Returns the number of slots: one for the record in use, `queue_depth` for records that are read ahead, and
  /// `queue_depth` for records that are written in the background.
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
