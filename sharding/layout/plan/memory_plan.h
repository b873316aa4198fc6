#pragma once

// See docs/glossary.md: slot, tier, unit.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sharding/compress/method_layout.h"
#include "sharding/layout/chunks.h"
#include "sharding/layout/plan/microbatch_order.h"
#include "sharding/layout/plan/plan_input.h"
#include "sharding/layout/plan/plan_parts.h"
#include "sharding/layout/plan/step_program.h"
#include "tessera/memory.h"
#include "tessera/strategy.h"

namespace tessera {

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
  /// Returns whether a unit's gradients stay in place until a microbatch's backward has ended. They stay if they
  /// accumulate there over microbatches, if they join a tree (SumPlan::waiting_sums), or if there is one rank and sums
  /// are not offloaded.
  bool keeps_gradients() const;
  /// Some sums wait for other sums of the tree (SumPlan::waiting_sums). `waiting_numel_of` returns the number of fp32
  /// elements of one such sum of a unit, and `waiting_bytes` the number of bytes of all these sums.
  std::int64_t waiting_numel_of(const UnitShape& unit) const;
  /// Returns the index of the first place for the whole gradients of other ranks' microbatches that this rank computes.
  /// There is one place for each such microbatch (MicrobatchOrder::backups). These places follow the places of this
  /// rank's own run.
  int first_backup() const { return sums_.waiting_sums - static_cast<int>(input_.wire.backups); }
  std::int64_t waiting_bytes() const;
  /// Returns whether gradients are cut over all ranks. Each rank then adds up the block sums (SumPlan::block_sums) of
  /// the part that it keeps, and need not send the result to other ranks.
  bool joins_own_parts() const { return input_.placement.gradients.shard && input_.placement.mesh.replicate_size == 1; }
  /// Returns the fp32 elements of the memory through which the pieces of blocks go (SumPlan::block_piece_numel).
  std::int64_t block_exchange_numel() const;
  /// Returns the bytes that a rank sends in a step: the bytes of block sums, and the bytes of joined sums that are sent
  /// to other ranks.
  std::int64_t block_bytes_of_step() const;
  /// The first function returns the bytes of a rank's message with the running statistics of its microbatches
  /// (PlannedWire::statistics_numel). Its all-gather ends a step. The second function returns the bytes of the memory
  /// for this message and for the messages of all ranks.
  std::int64_t statistics_message_bytes() const;
  std::int64_t statistics_bytes() const;
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
  /// The number of bits of the digest in the notes about a unit (SumPlan::notes_numel). The notes have a number for
  /// each trainable parameter, then these bits, then a weight and a number of samples.
  static constexpr std::int64_t kDigestBits = 64;

  /// Returns the formats of the states that the optimizer keeps for each element of a trainable group.
  const StateFormats& states_of(const GroupShape& group) const;
  /// Returns the bytes for the exchange of matrices.
  std::int64_t matrix_bytes() const {
    return (2 * passes_.matrices.exchange_numel() + passes_.matrices.work_numel() + own_masters_numel()) * 4;
  }
  /// Returns the part of matrix_bytes(), in fp32 elements, for masters of a batch that are not sent. It is above 0 only
  /// for rules of whole tensors that read masters in a first pass.
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
  /// Returns the pinned memory for outer gradients (SyncConfig) that replicas of GPUs compress. Under streaming_diloco,
  /// this memory has a slot for each group of a fragment; otherwise it has one slot, since the host waits for each sum.
  SlotsOnHost outer_sums_on_host() const;
  /// These functions return the pinned memory for values that GPUs gather in another form (PlannedWire::gathers,
  /// replica_gathers). For `gathers` it has a slot for each group of the units that are gathered ahead, and of the unit
  /// in use. For `replica_gathers` it has one slot. If more gathers are to be under way, the oldest gather is completed
  /// first.
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
  /// Returns whether the group is one shard if ranks have common parameters, since its rule needs norms of parameters,
  /// or whole tensors. Other groups are cut into a shard for each owner.
  bool has_whole_shard(const GroupShape& group) const { return input_.update.twice || !group.matrices.empty(); }
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
  /// Returns the pools of the records that lie in files.
  std::vector<const RecordPool*> pools_in_files() const;

  /// Returns whether updated values are published asynchronously after the update, so that the next forward waits for
  /// them. The result is true on the CPU if ranks hold whole parameters that other ranks of the shard axis update, and
  /// if there are no outer steps. It is false if all values are checked after each step, since the check would have to
  /// wait for them. `gathers_in_background` is true if the shard axis's transport makes gathers in the background
  /// (Collectives::gathers_in_background).
  bool publishes_behind(bool gathers_in_background) const;
  /// Returns the inputs that decide the order of this plan's steps (step_programs).
  StepInput step_input(bool gathers_in_background) const;

  /// Returns a table with a row for each category: its bytes and its content. Lines below it give the bytes that a step
  /// copies, reads and writes, and the sums that wait in scratch, if the strategy asks for them.
  std::string to_table() const;

 private:
  using Steps = std::span<const StepProgram>;  ///< the programs that step_programs returns
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
