#pragma once

// See docs/glossary.md: dealt, placement, slot, tier, unit.

#include <algorithm>
#include <cstdint>

#include "runtime/base/even_spread.h"
#include "runtime/base/state_dtype.h"
#include "sharding/layout/matrix_deal.h"
#include "sharding/layout/plan/record_layout.h"
#include "sharding/layout/plan/record_traffic.h"
#include "tessera/memory.h"
#include "tessera/strategy.h"

namespace tessera {

// This header has the four small plans of which a MemoryPlan consists, and the numbers in them.

/// The memory in which gradients wait for their reduction.
enum class BucketMode {
  kInPlace,      ///< the gradient buffer itself: for replicated fp32 gradients that are reduced once in each step, or
                 ///< for one rank
  kAccumulator,  ///< fp32 buffers of full size, one for each unit: for unsharded accumulation over microbatches
  kShared,       ///< a few bucket slots, which units use one after another
};

/// Memory of one optimizer state of `numel` elements: its numbers, then its scales; both end at the end of a cache
/// line. Some processors are slow if pieces begin at distances that are multiples of 128 MiB. The length of large
/// pieces is chosen to avoid this.
struct StatePiece {
  std::int64_t data_bytes = 0, scale_bytes = 0;
  std::int64_t bytes() const { return data_bytes + scale_bytes; }
};
/// Returns the piece for `numel` elements in the format `dtype`.
StatePiece state_piece(StateDType dtype, std::int64_t numel);

/// The number of fp32 elements that error feedback keeps for a group on each axis. It is the number of elements that
/// this rank compresses, rounded up to whole cache lines.
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
  /// Bytes of all records, if they lie in pinned memory of the GPU's host (tier "host"). These records have no slots on
  /// the host.
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
  /// (Placement::keep_gathered). If Placement::shared is true, the ranks of the shard axis share the slots.
  std::int64_t shared_slots = 0;
  std::int64_t slot_bytes = 0;  ///< bytes of a shared slot
  /// Bytes of records of parameters that a step copies to a GPU for gathers, from the second step on. Records in files
  /// are copied through pieces of host memory; there is one piece for each unit whose copies may be under way.
  std::int64_t uploaded_bytes = 0;
  std::int64_t upload_piece_bytes = 0;  ///< bytes of a piece
  std::int64_t upload_pieces() const { return upload_piece_bytes > 0 ? shared_slots + 1 : 0; }
};

/// The buffers in which gradients are summed, and the time for which a unit's reduction is under way.
struct SumPlan {
  BucketMode bucket_mode = BucketMode::kShared;
  std::int64_t shared_buckets = 0;  ///< number of buckets that units share; the root unit has one more
  std::int64_t bucket_bytes = 0;    ///< bytes of a shared bucket
  /// `reduction_lag` is the number of units after which a rank does its share of a unit's reduction (Work::advance).
  /// `end_lag` is the number of units, from the start of the reduction, after which the rank waits for the end of the
  /// reduction; if it is 0, the rank waits directly after the start.
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
  /// Otherwise they are sums of this rank's part, and the last place is for the total.
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

/// Numbers of elements for outer steps and asynchronous steps (SyncConfig). `part` is this rank's part of all masters.
/// `states` counts outer weights and momentum under outer steps, each with as many elements as `part`. Under
/// asynchronous steps, `states` counts the values that ranks pull and, if lambda is adaptive, the means of squares
/// (DelayCompensationConfig). If a rank of Hogwild keeps all states itself, `states` also counts the states of the
/// other ranks' parts. `states` is part of MemoryCategory::kOptimizer. `largest` is the largest group, whole, while it
/// is sent over the replicate axis. `sent` is, under streaming_diloco, this rank's part of the outer gradients of the
/// largest fragment. `largest` and `sent` are counted in kStaging.
struct OuterNumel {
  std::int64_t part = 0, states = 0, largest = 0, sent = 0;
  std::int64_t served = 0;  ///< number of elements of all shards that parameter servers own
  /// Scratch with which a rank updates whole matrices in shards that ranks own: kStaging, or kHostRecords if a GPU
  /// trains.
  std::int64_t work = 0;
  /// If ranks have common parameters: bytes of the values and states of this rank's shards, or of its states alone if
  /// servers own the shards. They lie in memory of the host: kOptimizer, or kHostRecords if a GPU trains.
  std::int64_t shard_bytes = 0;
  std::int64_t copied_bytes = 0;  ///< bytes of the copies of a GPU's values and gradients (HostCopies; kHostRecords)
  std::int64_t staging() const { return largest + sent; }
};

/// The memory with which the passes of an update work, and the part of an update that a GPU's host makes.
struct PassPlan {
  /// The parameters that are updated as whole matrices. The memory for their exchange (MemoryPlan::matrix_bytes) has
  /// first the buffers for messages, and then scratch. If ranks have common parameters, nothing is exchanged, and no
  /// matrices are dealt (MemoryPlan::has_whole_shard).
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
  /// Records of parameters. The records of trainable groups come first, and the records of frozen groups follow, both
  /// in unit order.
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
  /// for records of masters and states. The number is OffloadConfig::queue_depth. If the strategy does not set that
  /// key, the number is kQueueDepth. If units are updated in backward, and no GPU brings offloaded parameters, the
  /// default is instead the number of records of a unit, but at least kQueueDepth and at most half of kMostQueueDepth.
  /// A user who has the memory may set a larger number.
  std::int64_t queue_depth = kQueueDepth;
  /// Bytes of records of states and tensor states that all passes of a step copy to the GPU; the same number is copied
  /// back. It is 0 on the CPU, and if the host's CPU updates these records.
  std::int64_t streamed_bytes = 0;
  /// Bytes that a step copies between a GPU's slots (RecordPool::device_slots) and records of gradients; zeros on the
  /// CPU.
  HostStepBytes gradient_copies;
  DiskUse disk;  ///< bytes of the files, and bytes that steps read from and write to them
};

}  // namespace tessera
