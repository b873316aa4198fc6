#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/even_spread.h"
#include "runtime/base/state_dtype.h"
#include "sharding/layout/chunks.h"
#include "sharding/layout/factor_layout.h"
#include "sharding/layout/matrix_deal.h"
#include "sharding/layout/placement.h"
#include "sharding/layout/plan/record_layout.h"
#include "sharding/layout/plan/record_traffic.h"
#include "sharding/layout/plan/step_program.h"
#include "sharding/layout/shapes.h"
#include "tessera/dtype.h"
#include "tessera/memory.h"
#include "tessera/strategy.h"

namespace tessera {

/// Where gradients wait for their reduction.
enum class BucketMode {
  kInPlace,      ///< in the gradient buffer itself: replicated fp32 gradients reduced once a step, or one rank
  kAccumulator,  ///< in fp32 buffers of full size, one a unit: unsharded accumulation over microbatches
  kShared,       ///< in a few bucket slots that units take turns in
};

/// All that decides how much memory a rank needs, and nothing else.
struct PlanInput {
  std::vector<UnitShape> units;  ///< the root unit first
  Placement placement;
  MeshPosition mesh;
  std::int64_t prefetch = 1;
  DType reduce = DType::kF32;
  std::int64_t accumulation = 1;
  GradientSync sync = GradientSync::kEachMicrobatch;
  MasterKind master = MasterKind::kSplitBF16;
  StateFormats states = {StateDType::kF32, StateDType::kF32};  ///< of the optimizer
  StateFormats matrix_states = {};                             ///< of groups that are updated as matrices
  MatrixWork matrix_work = {};
  /// On a GPU, where reductions run beside backward: each has a unit's time to end, whatever that costs.
  bool is_queued = false;
  /// Reductions over some axis go on by themselves while ranks compute (Collectives::reduces_in_background), over a network.
  bool reduces_in_background = false;
  std::optional<std::int64_t> reductions_ahead;  ///< Strategy::reductions_ahead
  OffloadConfig offload;                         ///< without its paths
  /// A unit is updated as soon as its gradients are summed (optimizer.in_backward).
  bool updates_in_backward = false;
  /// Updates go over all state twice (lamb, lars). The first time parameters are only read, and states too unless they move.
  bool updates_twice = false, first_pass_moves_states = false;
  bool copies_checkpoints = false;  ///< CheckpointConfig::async
  CompressionConfig compression = {};
  /// compression.gathers, where parameters go over a network: on the shard axis, and updated ones on the replicate axis. Lossy for units in
  /// slots alone: what stays in memory is updated there.
  WireForm gathers = WireForm::kPlain, replica_gathers = WireForm::kPlain;
  /// Of each axis's group: Collectives::compressed_part; 0 too where `compression` leaves the axis as it is.
  int compressed_shard_part = 0, compressed_replicate_part = 0;
  bool is_durable = false;  ///< DurableConfig
  /// CheckConfig::values: all values are looked at after each step. No byte depends on it (MemoryPlan::publishes_behind).
  bool checks_values = false;
  /// Replicas that train by themselves between outer steps, where there are any; `mesh` is that of one of them then.
  int replicas = 1;
  SyncConfig outer = {};
  int filling_buckets = 1;  ///< 2 where units cut modules (units.bucket_cap_mb): gradients come to two by turns
};

/// Of a state, what lies below memory for sure.
inline double share_below(const OffloadedState& state) {
  return state.tier == Tier::kNvme || state.tier == Tier::kHost ? state.fraction : 0.0;
}

/// Memory of one optimizer state of `numel` elements: its numbers, then its scales, each ending on a cache line. Large ones end such
/// that the next one does not begin a multiple of 128 MiB behind them, at which distance processors are slow.
struct StatePiece {
  std::int64_t data_bytes = 0, scale_bytes = 0;
  std::int64_t bytes() const { return data_bytes + scale_bytes; }
};
StatePiece state_piece(StateDType dtype, std::int64_t numel);

/// What error feedback keeps of a group on each axis: as many fp32 as this rank rounds, up to a whole cache line.
struct FeedbackNumel {
  std::int64_t shard = 0, replicate = 0;
};

/// The records of one tier of a rank, of all its groups.
struct RecordPool {
  std::int64_t records = 0;       ///< 0 where all is in memory
  std::int64_t record_bytes = 0;  ///< of the largest one
  std::int64_t cached = 0;        ///< records that stay in memory: as many as the cache has room for
  std::int64_t cached_first = 0;  ///< of the first so many records before the others
  /// Pieces of memory for the others: those that are used, as many as are read ahead, and as many as are written behind. After
  /// a step they hold the records that it used last, with which the next one begins.
  std::int64_t slots = 0;
  /// Of those, the pieces that are used at once: one on the CPU, of tensor states those of a batch; and where a GPU trains as many as may be
  /// under way.
  std::int64_t held = 1;
  /// Where a GPU trains: pieces of its memory, through which records go from its host's and back, one for each that is used.
  std::int64_t device_slots = 0;
  /// All records, where they lie in pinned memory of the GPU's host (tier "host") and have no slots there.
  std::int64_t pinned_bytes = 0;
  /// Which ones stay in memory.
  EvenSpread cache() const { return {records, cached, cached_first}; }
  /// Of the host, where a GPU trains.
  std::int64_t memory_bytes() const { return (cached + slots) * record_bytes + pinned_bytes; }
  std::int64_t device_bytes() const { return device_slots * record_bytes; }
};

/// The exact memory plan of one rank (every rank's is equal, since shards are). Sizes here are what the engine then
/// allocates; it compares the two.
class MemoryPlan {
 public:
  /// Reductions that transports can have under way at a time.
  static constexpr std::int64_t kMostUnderWay = 16;

  MemoryPlan() = default;
  explicit MemoryPlan(PlanInput input);

  const PlanInput& input() const { return input_; }
  const MemoryUse& use() const { return use_; }
  BucketMode bucket_mode() const { return bucket_mode_; }
  /// Whether parameters, or some of them, lie in records: then units are gathered from there, on a rank alone too.
  bool parameters_below() const;
  /// And whether those lie in the memory of a GPU's host, where kernels of the GPU reach them.
  bool parameters_on_host() const { return parameter_records_.pinned_bytes > 0; }
  /// Whether sums of gradients lie in records from a unit's reduction to its update. They are made in the records' own memory, or of a GPU in
  /// slots of its memory.
  bool gradients_below() const { return input_.offload.gradients != Tier::kMemory; }
  /// Whether units are gathered before they are used, by some rank that does not have all of their parameters.
  bool gathers() const;
  /// How often a step gathers unit `index`, where units are used in the order of their definition, from the second step
  /// on. The root unit has a slot of its own and is gathered once. The others take turns in the shared slots: what a
  /// direction left in them, the next one (which begins there) finds.
  std::int64_t gathers_in_step(std::size_t index) const;
  /// Slots that sharded units share; each is `slot_bytes()`. The root unit has one of its own, since it is used first
  /// and last in both directions. Where nothing is gathered, or in parameter memory (Placement::keep_gathered), there are
  /// none. With Placement::shared the ranks of the shard axis have the slots together.
  std::int64_t shared_slots() const { return shared_slots_; }
  std::int64_t slot_bytes() const { return slot_bytes_; }
  std::int64_t shared_buckets() const { return shared_buckets_; }
  /// How many units later a rank does its share of a unit's reduction (Work::advance), and how many units later than
  /// its start it waits for its end. 0: it waits where it starts one.
  ///
  /// On the CPU of one host the end is twice as late as the share, so that a rank may be that many units ahead of another
  /// before it waits. Where it costs two buckets a unit it is what fits 8 MiB, and 3 at most. Over a network the end is one
  /// unit later, and as late as transports allow where that costs nothing. On a GPU the share is done at the start and the
  /// end is a unit later; where sums go on over the replicate axis, that begins a unit later and ends after another.
  std::int64_t reduction_lag() const { return reduction_lag_; }
  std::int64_t end_lag() const { return end_lag_; }
  std::int64_t bucket_bytes() const { return bucket_bytes_; }
  /// Scratch of one unit's reduction; every unit whose reduction may be under way has its own.
  std::int64_t scratch_numel() const { return scratch_numel_; }
  std::int64_t units_under_way() const { return end_lag_ + 1; }
  std::int64_t bucket_bytes_of(const UnitShape& unit) const;
  /// Of gradients in buckets that units share: that of the wire; fp32 on a rank alone, which has none.
  DType bucket_dtype() const;

  /// Where units are updated in backward, sums have no place of their own: units share so many, and the root unit has
  /// one. A unit takes its place when its reduction starts (with BucketMode::kInPlace when its first gradient comes), and
  /// gives it back when it is updated.
  std::int64_t shared_sums() const { return shared_sums_; }
  std::int64_t sum_bytes() const { return sum_bytes_; }
  /// This rank's part of a unit's gradients, fp32.
  std::int64_t sum_bytes_of(const UnitShape& unit) const;
  /// And what ranks tell each other of a unit with its reduction: so many fp32 for each that may be under way.
  std::int64_t notes_numel() const { return notes_numel_; }
  /// The bits of a digest among those, behind a number for each trainable parameter and before a weight.
  static constexpr std::int64_t kDigestBits = 64;

  /// What the optimizer keeps of each element of a trainable group.
  const StateFormats& states_of(const GroupShape& group) const;
  /// The matrices that are updated as such, and memory for their exchange: the buffers for messages, then the room to work in.
  const MatrixDeal& matrices() const { return matrices_; }
  std::int64_t matrix_bytes() const {
    return (2 * matrices_.exchange_numel() + matrices_.work_numel() + own_masters_numel()) * 4;
  }
  /// Of those, where rules of whole tensors read masters in a first pass: for masters of a batch that do not travel.
  std::int64_t own_masters_numel() const {
    const bool reads_masters = !input_.matrix_work.is_muon && (first_pass_.parameters || first_pass_.states);
    return reads_masters ? matrices_.own_numel() : 0;
  }
  /// What of matrices' groups an update goes through twice; the first time before what becomes of the matrices is known. Under muon
  /// directions are made from momenta then. Under rules of whole tensors masters are read: where they lie below memory, in records of
  /// parameters or of masters and states.
  struct FirstPass {
    bool parameters = false, states = false;
  };
  const FirstPass& first_pass_of_matrices() const { return first_pass_; }

  /// This rank's part of a group's GroupShape::tensor_states, fp32. In the order of units, the first so many groups that have such states have
  /// them in memory; the others, the share of OffloadConfig::moments, in a record each.
  Extent tensor_state_part_of(const GroupShape& group) const;
  std::int64_t tensor_states_in_memory() const { return tensor_states_in_memory_; }
  /// Those of a batch (MatrixBatch) are there at once, and those of another one on their way, read ahead and written behind.
  const RecordPool& tensor_state_records() const { return tensor_state_records_; }
  std::int64_t tensor_state_record_bytes_of(const GroupShape& group) const;
  /// The most that a batch has, and as many as are read ahead, and written behind.
  std::int64_t tensor_states_of_a_batch() const { return tensor_states_of_a_batch_; }
  std::int64_t tensor_states_ahead() const { return std::min(tensor_states_of_a_batch_, kMostQueueDepth); }

  /// On each axis; 0 where nothing is kept.
  FeedbackNumel feedback_numel_of(const GroupShape& group) const;
  /// Of a trainable group whose sums are made by a GradientMethod (MemoryCategory::kFeedback too); zeros where they are not.
  MethodMemory method_memory_of(const GroupShape& group) const;
  std::int64_t method_work_numel() const { return method_work_numel_; }  ///< all groups' together
  /// What all groups keep from step to step on both axes, fp32. With CompressionConfig::restore_skipped there is a copy of it, too.
  std::int64_t kept_gradient_numel() const { return kept_gradient_numel_; }

  /// How a trainable group's optimizer part is cut into records.
  RecordLayout records_of(const GroupShape& group) const;
  /// And this rank's part of its parameters. Without records where they are in memory.
  Chunks parameter_chunks_of(const GroupShape& group) const;
  /// The most records that the update of a unit moves: of parameters in files, or of masters and states.
  std::int64_t most_records_of_a_unit() const;
  /// Records of parameters, and of masters and states, that are read ahead, and as many that are written behind: OffloadConfig::queue_depth, or
  /// where it is left out kQueueDepth; with updates in backward those of a unit, half of kMostQueueDepth at most: who has the memory may say more.
  std::int64_t queue_depth() const { return queue_depth_; }
  /// With outer steps (SyncConfig): this rank's part of all masters, of which each outer state has as many (of
  /// MemoryCategory::kOptimizer); the largest group, whole, for their way over the replicate axis, and this rank's part of the largest
  /// fragment's outer gradients, with streaming_diloco (both of kStaging).
  struct OuterNumel {
    std::int64_t part = 0, largest = 0, sent = 0;
    std::int64_t staging() const { return largest + sent; }
  };
  const OuterNumel& outer_numel() const { return outer_numel_; }
  const RecordPool& state_records() const { return state_records_; }
  /// Bytes of them, and of tensor states, that a step copies to the GPU which trains, and copies back, in all its passes; 0 on the CPU, and where
  /// the host's CPU updates them.
  std::int64_t streamed_bytes() const { return streamed_bytes_; }
  /// Whether the CPU of the host updates a GPU's records where they lie (OffloadedStep::kCpu).
  bool steps_on_host() const { return steps_on_host_; }
  const HostStepBytes& host_step() const { return host_step_; }
  /// Of its host's pinned memory: gradients and parameters of what has records, but for those that lie there anyway.
  std::int64_t host_copies_bytes() const { return host_copies_bytes_; }
  /// Whether of each element in a record all is there that the optimizer keeps.
  bool has_whole_records() const;
  /// Whether updates look at all state twice (lamb, lars), or at whole matrices before they update elements of them.
  bool passes_twice() const { return input_.updates_twice || !matrices_.batches().empty(); }
  /// Whether the CPU could: they are whole, no parameters lie in files, and units are updated after backward, in one pass.
  bool can_step_on_host() const {
    return has_whole_records() && (!parameters_below() || parameters_on_host()) && !input_.updates_in_backward &&
           !passes_twice();
  }
  /// Whether a group's masters, or some of them, lie below memory, as such or as parameters.
  bool weights_below(const GroupShape& group) const;
  bool has_masters_in_records(const GroupShape& group) const;
  bool has_masters_in_parameter_records(const GroupShape& group) const;
  /// Of a GPU, under rules that want norms of weights: for a copy of those of the largest group that has some below, fp32.
  std::int64_t weight_copy_bytes() const { return weight_copy_bytes_; }
  /// Sums of gradients, a record a unit, and the bytes of one, in whole pages: 0 where a unit has nothing to train. The root unit's stay in
  /// memory, which it would need a slot of its own for.
  const RecordPool& gradient_records() const { return gradient_records_; }
  std::int64_t gradient_record_bytes_of(const UnitShape& unit) const;
  /// Where a GPU trains: bytes that a step copies between its slots (RecordPool::device_slots) and the records.
  const HostStepBytes& gradient_copies() const { return gradient_copies_; }
  /// Of those, as many as are read ahead of the update, and as many as are written behind.
  static constexpr std::int64_t kGradientsAhead = 1;
  /// Those of groups that train come first, then the frozen ones, each in the order of units.
  const RecordPool& parameter_records() const { return parameter_records_; }
  /// Where a GPU trains: bytes of them that a step copies there for gathers, from the second step on; and the host's memory through which
  /// those in files go, a piece for the parts of each unit that may be on its way.
  std::int64_t uploaded_bytes() const { return uploaded_bytes_; }
  std::int64_t upload_pieces() const { return upload_piece_bytes_ > 0 ? shared_slots_ + 1 : 0; }
  std::int64_t upload_piece_bytes() const { return upload_piece_bytes_; }
  /// Of a GPU's parameters in its host's memory: what kernels write there in an update, and what they read of those that are masters, or
  /// half of them.
  HostStepBytes updated_over_bus() const;
  /// Of what a commit (DurableConfig) writes from memory: this rank's parts of parameters, masters and states, one behind the other, and
  /// cached records. `image_bytes` of them in all.
  const RecordPool& image_records() const { return image_records_; }
  std::int64_t image_queue_depth() const { return input_.offload.queue_depth.value_or(kQueueDepth); }
  std::int64_t image_bytes() const { return image_bytes_; }
  const DiskUse& disk() const { return disk_; }
  /// Of all kinds; not those of tier "host".
  std::int64_t records_on_disk() const;

  /// Whether updated values are published behind the update, and the next forward waits for them: where ranks hold whole parameters that
  /// others update. What looks at all values after each step would wait for them there. `gathers_in_background`: the shard axis's
  /// transport carries gathers by itself (Collectives::gathers_in_background).
  bool publishes_behind(bool gathers_in_background) const;
  /// What decides the order of this plan's steps (step_programs).
  StepInput step_input(bool gathers_in_background) const;

  /// Categories down, bytes and what they are; then the formula's total beside 16 bytes a parameter.
  std::string to_table() const;

 private:
  using Steps = std::span<const StepProgram>;  ///< of step_programs
  std::vector<const RecordPool*> pools_in_files() const;
  void plan_parameters();
  void plan_gradients();
  void plan_sums();
  void plan_gradient_records(Steps steps);
  void plan_gradient_copies();
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
  void plan_image();
  void plan_outer();
  /// Memory for records that stay there: of the `first` ones before the others.
  struct Cache {
    std::int64_t bytes = 0, first = 0;
  };
  RecordPool plan_pool(const std::vector<std::int64_t>& bytes, Cache cache, std::int64_t slots);
  RecordPool plan_streamed_pool(const std::vector<std::int64_t>& bytes, Cache cache);
  RecordPool plan_uploaded_pool(const std::vector<std::int64_t>& bytes, Cache cache);
  RecordPool plan_files_of_gpu(const std::vector<std::int64_t>& bytes, Cache cache, std::int64_t held,
                               std::int64_t more);
  void plan_host_step();
  /// A GPU's records of masters and states lie in its host's memory; and the host's CPU updates them there.
  bool states_on_host() const;
  bool states_stay_on_host() const;
  VisitWork first_work() const;
  /// Slots for one record that is used, for those that are read ahead, and for those that are written behind.
  static std::int64_t slots_of(std::int64_t queue_depth) { return 2 * queue_depth + 1; }
  std::int64_t slots_of_queue() const { return slots_of(queue_depth_); }
  std::int64_t chosen_queue_depth() const;
  void count(Steps steps, RecordKind kind, const RecordList& records, const RecordPool& pool);

  PlanInput input_;
  MemoryUse use_;
  BucketMode bucket_mode_ = BucketMode::kShared;
  std::int64_t shared_slots_ = 0, slot_bytes_ = 0;
  std::int64_t shared_buckets_ = 0, bucket_bytes_ = 0, reduction_lag_ = 0, end_lag_ = 0;
  std::int64_t scratch_numel_ = 0;
  std::int64_t shared_sums_ = 0, sum_bytes_ = 0, notes_numel_ = 0;
  std::int64_t method_work_numel_ = 0, kept_gradient_numel_ = 0;
  MatrixDeal matrices_;
  FirstPass first_pass_;
  RecordPool state_records_, parameter_records_, tensor_state_records_, gradient_records_, image_records_;
  std::int64_t tensor_states_in_memory_ = 0, tensor_states_of_a_batch_ = 0;
  OuterNumel outer_numel_;
  std::int64_t image_bytes_ = 0, streamed_bytes_ = 0, uploaded_bytes_ = 0, upload_piece_bytes_ = 0;
  HostStepBytes host_step_, gradient_copies_;
  std::int64_t host_copies_bytes_ = 0, weight_copy_bytes_ = 0;
  bool steps_on_host_ = false;
  std::int64_t queue_depth_ = kQueueDepth;
  DiskUse disk_;
};

}  // namespace tessera
