// This file plans offloaded state: records, their slots, and the bytes that move. It is the part of MemoryPlan that
// handles tiers.
//
// Each kind of state (parameters, masters and states, tensor states, sums of gradients) becomes a list of records, one
// for each offloaded chunk. A pool then has three numbers: the records that are cached, the slots that the other
// records share, and the bytes of the pool on a GPU or its host. A simulation of the step's programs (step_programs) on
// these lists (record_traffic.h) counts the bytes that are read and written. The image of a commit is planned last: it
// consists of the state that the pools keep in memory.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <span>

#include "sharding/layout/plan/memory_plan.h"

namespace tessera {
namespace {

/// Returns the bytes that `bytes` take up on a disk: whole pages.
std::int64_t in_pages(std::int64_t bytes) { return rounded_up(bytes, Chunks::kPage); }

std::int64_t sum(std::span<const std::int64_t> bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

}  // namespace

std::int64_t MemoryPlan::most_records_of_a_unit() const {
  // parameters in pinned memory are updated in place, so their records are not counted
  const bool has_parameters = input_.tiers.parameters.tier == Tier::kNvme;
  std::int64_t most = 0;
  for (const UnitShape& unit : input_.units) {
    std::int64_t states = 0, parameters = 0;
    for (const GroupShape& group : unit.groups) {
      if (!group.trainable) continue;
      states += records_of(group).records();
      if (has_parameters) parameters += parameter_chunks_of(group).records();
    }
    most = std::max({most, states, parameters});
  }
  return most;
}

std::int64_t MemoryPlan::chosen_queue_depth() const {
  if (input_.tiers.queue_depth) return *input_.tiers.queue_depth;
  // If units are brought from a GPU's host, the queue depth is kQueueDepth, even if units are updated in backward.
  const bool gives_way = input_.placement.is_queued && parameters_below();
  if (!input_.update.in_backward || gives_way) return kQueueDepth;
  return std::clamp(most_records_of_a_unit(), kQueueDepth, kMostQueueDepth / 2);
}

RecordPool MemoryPlan::plan_pool(const std::vector<std::int64_t>& bytes, Cache cache, std::int64_t slots) {
  RecordPool pool;
  if (bytes.empty()) return pool;
  pool.records = static_cast<std::int64_t>(bytes.size());
  pool.record_bytes = *std::max_element(bytes.begin(), bytes.end());
  pool.cached = std::min(cache.bytes / pool.record_bytes, pool.records);
  pool.cached_first = cache.first;
  pool.slots = std::min(slots, pool.records - pool.cached);
  use_[MemoryCategory::kRecords] += pool.memory_bytes();
  const EvenSpread cached = pool.cache();
  for (std::int64_t record = 0; record < pool.records; ++record) {
    if (!cached.has(record)) records_.disk.bytes += bytes[static_cast<std::size_t>(record)];
  }
  return pool;
}

namespace {

/// Makes a pool of records in pinned memory of a GPU's host.
RecordPool pinned_pool(const std::vector<std::int64_t>& bytes) {
  RecordPool pool;
  pool.records = static_cast<std::int64_t>(bytes.size());
  pool.record_bytes = *std::max_element(bytes.begin(), bytes.end());
  pool.pinned_bytes = sum(bytes);
  return pool;
}

}  // namespace

/// Plans a pool of records that lie in files and are used by a GPU, `held` of them at once. Their slots lie in memory
/// of the GPU's host; `more` slots are for records that are read ahead and written in the background.
RecordPool MemoryPlan::plan_files_of_gpu(const std::vector<std::int64_t>& bytes, Cache cache, std::int64_t held,
                                         std::int64_t more) {
  RecordPool pool = plan_pool(bytes, cache, more + held);
  pool.held = held;
  use_[MemoryCategory::kRecords] -= pool.memory_bytes();
  return pool;
}

/// Plans a pool of records that a GPU updates. These records have slots on the GPU, to which they are copied from its
/// host's memory, and from which they are copied back. Records in files also have slots on the host, while they are on
/// the GPU, are read ahead, or are written in the background.
RecordPool MemoryPlan::plan_streamed_pool(const std::vector<std::int64_t>& bytes, Cache cache) {
  if (bytes.empty()) return {};
  const bool on_host = states_on_host(), stays = states_stay_on_host();
  const std::int64_t under_way = std::min(slots_of_queue(), std::ssize(bytes));
  RecordPool pool = on_host ? pinned_pool(bytes) : plan_files_of_gpu(bytes, cache, under_way, 2 * records_.queue_depth);
  pool.device_slots = stays ? 0 : under_way;
  use_[MemoryCategory::kRecords] += pool.device_bytes();
  use_[MemoryCategory::kHostRecords] += pool.memory_bytes();
  if (stays) plan_host_step();
  return pool;
}

void MemoryPlan::plan_host_step() {
  passes_.steps_on_host = true;
  for (const UnitShape& unit : input_.units) {
    const bool has_sums_on_host = input_.tiers.gradients == Tier::kHost && &unit != &input_.units[0];
    for (const GroupShape& group : unit.groups) {
      if (!group.trainable) continue;
      const RecordLayout records = records_of(group);
      const std::int64_t numel = records.numel() - records.before_records();
      const Extent part = optimizer_part_of(group);
      const Extent parameters_part = owned(input_.placement.parameters, input_.placement.mesh, group.layout.numel());
      const std::int64_t on_gpu = intersect({part.offset + records.before_records(), numel},
                                            {parameters_part.offset, parameter_chunks_of(group).before_records()})
                                      .numel;
      const std::int64_t gradients = has_sums_on_host ? 0 : 4 * numel;
      const std::int64_t parameters = on_gpu * group.element_bytes();
      passes_.host_copies_bytes += gradients + parameters;
      passes_.host_step.to_host += gradients + (holds_masters(input_.update.master, group.dtype) ? parameters : 0);
      passes_.host_step.to_gpu += parameters;
    }
  }
  use_[MemoryCategory::kHostRecords] += passes_.host_copies_bytes;
}

bool MemoryPlan::weights_below(const GroupShape& group) const {
  return has_masters_in_records(group) || has_masters_in_parameter_records(group);
}

bool MemoryPlan::has_masters_in_records(const GroupShape& group) const {
  const RecordLayout records = records_of(group);
  return records.masters_in_memory() < records.numel();
}

bool MemoryPlan::has_masters_in_parameter_records(const GroupShape& group) const {
  return holds_masters(input_.update.master, group.dtype) && parameter_chunks_of(group).records() > 0;
}

void MemoryPlan::plan_first_pass() {
  const bool reads_masters = !input_.update.matrix_work.is_muon;
  FirstPass& first = passes_.first_pass;
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    if (group.matrices.empty()) return;
    first.states = first.states || !reads_masters || has_masters_in_records(group);
    first.parameters = first.parameters || (reads_masters && has_masters_in_parameter_records(group));
  });
}

void MemoryPlan::plan_weight_copy() {
  if (!input_.placement.is_queued || !input_.update.twice) return;
  std::int64_t most = 0;
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    if (weights_below(group)) most = std::max(most, records_of(group).numel());
  });
  passes_.weight_copy_bytes = MatrixDeal::in_whole_lines(most) * 4;
  use_[MemoryCategory::kStaging] += passes_.weight_copy_bytes;
}

bool MemoryPlan::has_whole_records() const {
  bool are_whole = true;
  for_each_trainable(input_.units,
                     [&](const GroupShape& group) { are_whole = are_whole && records_of(group).are_whole(); });
  return are_whole;
}

bool MemoryPlan::states_on_host() const {
  return input_.placement.is_queued &&
         (input_.tiers.masters.tier == Tier::kHost || input_.tiers.moments.tier == Tier::kHost);
}

bool MemoryPlan::states_stay_on_host() const { return states_on_host() && input_.tiers.step == OffloadedStep::kCpu; }

VisitWork MemoryPlan::first_work() const {
  if (input_.update.twice)
    return input_.update.first_pass_moves_states ? VisitWork::kLayerUpdates : VisitWork::kMeasure;
  const auto is_dealt = [](const GroupShape& group) { return group.trainable && !group.matrices.empty(); };
  const bool has_matrices = std::ranges::any_of(
      input_.units, [&](const UnitShape& unit) { return std::ranges::any_of(unit.groups, is_dealt); });
  if (!has_matrices) return VisitWork::kUpdate;
  return input_.update.matrix_work.is_muon ? VisitWork::kDirections : VisitWork::kReadMasters;
}

bool MemoryPlan::publishes_behind(bool gathers_in_background) const {
  const Placement& placement = input_.placement;
  return gathers_in_background && input_.placement.mesh.shard_size > 1 && placement.optimizer.shard &&
         !placement.optimizer.replicate && !placement.parameters.shard && !input_.placement.is_queued &&
         input_.update.outer.type == SyncType::kEachStep && !input_.update.checks_values;
}

StepInput MemoryPlan::step_input(bool gathers_in_background) const {
  StepInput step;
  for (std::size_t unit = 0; unit < input_.units.size(); ++unit) {
    for (const GroupShape& group : input_.units[unit].groups) {
      step.parameters.exist = step.parameters.exist || parameter_chunks_of(group).records() > 0;
      if (!group.trainable) continue;
      const RecordLayout records = records_of(group);
      step.states.exist = step.states.exist || records.records() > 0;
      const bool by_device = !states_stay_on_host() || records.before_records() > 0;
      step.groups.push_back({static_cast<std::int32_t>(unit), !group.matrices.empty(), by_device});
    }
  }
  step.rounds = input_.wire.accumulation;
  step.first_work = first_work();
  step.first_reads_parameters = passes_.first_pass.parameters;
  step.first_reads_states = passes_.first_pass.states;
  step.parameters.in_files = !(input_.placement.is_queued && input_.tiers.parameters.tier == Tier::kHost);
  step.states.in_files = !states_on_host();
  step.gradients_below = gradients_below();
  step.updates_in_backward = input_.update.in_backward;
  step.publishes_behind = publishes_behind(gathers_in_background);
  step.shares_parameters = input_.placement.shared;
  step.executor = {input_.placement.is_queued, step.states.exist && states_stay_on_host()};
  return step;
}

/// Counts the bytes of `records` that move through the pool's slots; cached and pinned records do not move.
void MemoryPlan::count(Steps steps, RecordKind kind, const RecordList& records, const RecordPool& pool) {
  if (records.bytes.empty() || pool.pinned_bytes > 0) return;
  const RecordMoves moves = moves_in_two_steps(steps, kind, records.without(pool.cache()), pool.slots);
  records_.disk.read_in_two_steps += moves.read;
  records_.disk.written_in_two_steps += moves.written;
}

void MemoryPlan::plan_parameter_records(Steps steps) {
  RecordList records;
  std::vector<std::int64_t> gathers;  // number of gathers in a step, for each record
  for (const bool trains : {true, false}) {
    for (std::size_t i = 0; i < input_.units.size(); ++i) {
      for (const GroupShape& group : input_.units[i].groups) {
        if (group.trainable != trains) continue;
        const Chunks chunks = parameter_chunks_of(group);
        for (std::int64_t chunk = chunks.first_record(); chunk < chunks.chunks(); ++chunk)
          records.bytes.push_back(chunks.chunk(chunk).numel * group.element_bytes());
        gathers.resize(records.bytes.size(), gathers_in_step(i));
        if (trains) records.end_owner();
      }
    }
  }
  const std::vector<std::int64_t>& bytes = records.bytes;
  if (bytes.empty()) return;
  // Records of trainable groups are cached first, since the update reads and writes them too.
  const Cache cache{input_.tiers.cache_bytes, static_cast<std::int64_t>(records.first.back())};
  if (input_.placement.is_queued) {
    for (std::size_t i = 0; i < bytes.size(); ++i) slots_.uploaded_bytes += gathers[i] * bytes[i];
    records_.parameters = plan_uploaded_pool(bytes, cache);
    if (parameters_on_host()) return;
  } else {
    records_.parameters = plan_pool(bytes, cache, slots_of_queue());
  }
  const EvenSpread cached = records_.parameters.cache();
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (!cached.has(static_cast<std::int64_t>(i))) records_.disk.read_in_two_steps += 2 * gathers[i] * bytes[i];
  }
  count(steps, RecordKind::kParameters, records, records_.parameters);
}

std::int64_t MemoryPlan::tensor_state_record_bytes_of(const GroupShape& group) const {
  return in_pages(4 * tensor_state_part_of(group).numel);
}

/// Tensor states move batch by batch. Each unit owns records, or none if its states stay in memory.
void MemoryPlan::plan_tensor_states(Steps steps) {
  std::vector<std::int64_t> bytes;  // bytes for each group that has tensor states
  RecordList records;
  std::vector<std::size_t> units;  // unit of each of these groups
  for (std::size_t unit = 0; unit < input_.units.size(); ++unit) {
    for (const GroupShape& group : input_.units[unit].groups) {
      const std::int64_t numel = group.trainable ? tensor_state_part_of(group).numel : 0;
      if (numel == 0) continue;
      bytes.push_back(4 * numel);
      records.bytes.push_back(tensor_state_record_bytes_of(group));
      units.push_back(unit);
    }
  }
  const auto below =
      static_cast<std::int64_t>(std::ceil(share_below(input_.tiers.moments) * static_cast<double>(bytes.size())));
  records_.tensor_states_in_memory = std::ssize(bytes) - below;
  use_[MemoryCategory::kOptimizer] +=
      sum(std::span(bytes).first(static_cast<std::size_t>(records_.tensor_states_in_memory)));
  if (below == 0) return;
  records.bytes.erase(records.bytes.begin(), records.bytes.begin() + records_.tensor_states_in_memory);
  units.erase(units.begin(), units.begin() + records_.tensor_states_in_memory);
  for (const MatrixBatch& batch : passes_.matrices.batches()) {
    const auto of_batch = std::ranges::count_if(
        units, [&](std::size_t unit) { return batch.begin_unit <= unit && unit < batch.end_unit; });
    records_.tensor_states_of_a_batch = std::max<std::int64_t>(records_.tensor_states_of_a_batch, of_batch);
  }
  const std::int64_t most = records_.tensor_states_of_a_batch, more = 2 * records_.tensor_states_ahead();
  RecordPool& pool = records_.tensor_states;
  if (input_.placement.is_queued) {
    const std::int64_t device_slots = std::min(2 * most, below);
    const bool on_host = input_.tiers.moments.tier == Tier::kHost;
    pool = on_host ? pinned_pool(records.bytes) : plan_files_of_gpu(records.bytes, /*cache=*/{}, device_slots, more);
    pool.device_slots = device_slots;
    use_[MemoryCategory::kRecords] += pool.device_bytes();
    use_[MemoryCategory::kHostRecords] += pool.memory_bytes();
    records_.streamed_bytes += sum(records.bytes);
  } else {
    pool = plan_pool(records.bytes, /*cache=*/{}, most + more);
    pool.held = most;
  }
  for (std::size_t unit = 0; unit < input_.units.size(); ++unit) {
    const auto end = std::ranges::upper_bound(units, unit);
    records.first.push_back(static_cast<std::size_t>(end - units.begin()));
  }
  count(steps, RecordKind::kTensorStates, records, pool);
}

/// Plans a pool of records that are copied to a GPU when units are gathered. Updates change these records in place, on
/// the host.
RecordPool MemoryPlan::plan_uploaded_pool(const std::vector<std::int64_t>& bytes, Cache cache) {
  if (input_.tiers.parameters.tier == Tier::kHost) {
    const RecordPool pool = pinned_pool(bytes);
    use_[MemoryCategory::kHostRecords] += pool.memory_bytes();
    return pool;
  }
  const std::int64_t held = std::min(slots_of_queue(), std::ssize(bytes));
  const RecordPool pool = plan_files_of_gpu(bytes, cache, held, 2 * records_.queue_depth);
  for (const UnitShape& unit : input_.units) {
    std::int64_t in_files = 0;
    for (const GroupShape& group : unit.groups) in_files += parameter_bytes_below(group);
    slots_.upload_piece_bytes = std::max(slots_.upload_piece_bytes, in_files);
  }
  use_[MemoryCategory::kHostRecords] += pool.memory_bytes() + slots_.upload_pieces() * slots_.upload_piece_bytes;
  return pool;
}

/// Returns the bytes of this rank's part of a group's parameters that lie in records.
std::int64_t MemoryPlan::parameter_bytes_below(const GroupShape& group) const {
  const Chunks chunks = parameter_chunks_of(group);
  return (chunks.numel() - chunks.before_records()) * group.element_bytes();
}

HostStepBytes MemoryPlan::updated_over_bus() const {
  HostStepBytes bytes;
  if (!input_.placement.is_queued) return bytes;
  for_each_trainable(input_.units, [&](const GroupShape& group) {
    const std::int64_t below = parameter_bytes_below(group);
    bytes.to_host += below;
    if (holds_masters(input_.update.master, group.dtype)) bytes.to_gpu += below;
  });
  return bytes;
}

std::int64_t MemoryPlan::gradient_record_bytes_of(const UnitShape& unit) const { return in_pages(sum_bytes_of(unit)); }

void MemoryPlan::plan_gradient_records(Steps steps) {
  RecordList records;
  for (const UnitShape& unit : input_.units) {
    if (&unit != &input_.units[0] && unit.trainable_numel() > 0)
      records.bytes.push_back(gradient_record_bytes_of(unit));
    records.end_owner();
  }
  const std::vector<std::int64_t>& bytes = records.bytes;
  if (input_.placement.is_queued) {
    const std::int64_t device_slots = std::min(sums_.units_under_way() + 1, std::ssize(bytes));
    const std::int64_t held = std::min(device_slots + 1, std::ssize(bytes));
    records_.gradients = input_.tiers.gradients == Tier::kHost
                             ? pinned_pool(bytes)
                             : plan_files_of_gpu(bytes, /*cache=*/{}, held, 2 * kGradientsAhead);
    records_.gradients.device_slots = device_slots;
    use_[MemoryCategory::kRecords] += records_.gradients.device_bytes();
    use_[MemoryCategory::kHostRecords] += records_.gradients.memory_bytes();
    plan_gradient_copies();
  } else {
    records_.gradients = plan_pool(bytes, /*cache=*/{}, sums_.units_under_way() + 2 * kGradientsAhead);
  }
  count(steps, RecordKind::kGradients, records, records_.gradients);
}

/// Returns whether the device that trains updates at least a part of the unit. Otherwise its host's CPU updates all of
/// it.
bool MemoryPlan::updates_by_device(const UnitShape& unit) const {
  return std::ranges::any_of(unit.groups, [&](const GroupShape& group) {
    return group.trainable && (!passes_.steps_on_host || records_of(group).before_records() > 0);
  });
}

/// Each microbatch copies all sums of gradients to the host. Each microbatch except the first copies them to the GPU
/// before it adds to them. The update copies to the GPU the sums that it needs there.
void MemoryPlan::plan_gradient_copies() {
  for (const UnitShape& unit : std::span(input_.units).subspan(1)) {
    const std::int64_t bytes = sum_bytes_of(unit);
    records_.gradient_copies.to_host += input_.wire.accumulation * bytes;
    records_.gradient_copies.to_gpu += (input_.wire.accumulation - 1 + (updates_by_device(unit) ? 1 : 0)) * bytes;
  }
}

void MemoryPlan::plan_image() {
  if (!input_.tiers.is_durable) return;
  records_.image_bytes = use_[MemoryCategory::kMasters] + use_[MemoryCategory::kOptimizer];
  records_.image_bytes += 4 * sums_.kept_gradient_numel;
  for (const RecordPool& pool : {records_.states, records_.parameters, records_.tensor_states})
    records_.image_bytes += pool.cached * pool.record_bytes + pool.pinned_bytes;
  for_each_group(input_.units, [&](const GroupShape& group) {
    records_.image_bytes += parameter_chunks_of(group).before_records() * group.element_bytes();
  });
  records_.disk.durable_bytes = records_.disk.bytes;  // each record has a second place in its file, for commits
  std::vector<std::int64_t> bytes;
  for (std::int64_t left = records_.image_bytes; left > 0; left -= bytes.back()) {
    bytes.push_back(in_pages(std::min(left, input_.tiers.record_bytes)));
  }
  const std::int64_t before = records_.disk.bytes;
  records_.image = plan_pool(bytes, /*cache=*/{}, slots_of(image_queue_depth()));
  if (input_.placement.is_queued) {  // a GPU copies the commit's image to memory of its host
    use_[MemoryCategory::kRecords] -= records_.image.memory_bytes();
    use_[MemoryCategory::kHostRecords] += records_.image.memory_bytes();
  }
  records_.disk.written_in_commit = sum(bytes);
  records_.disk.bytes = before;
  records_.disk.durable_bytes += 2 * records_.disk.written_in_commit;
}

/// Plans the slots of activations in files. Memory for activations on a GPU's host is allocated when they are
/// offloaded. Its size is not known to a plan.
void MemoryPlan::plan_activations() {
  const OffloadConfig& offload = input_.tiers;
  if (offload.activations != Tier::kNvme) return;
  const std::int64_t piece = in_pages(offload.record_bytes);
  use_[input_.placement.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kActivations] +=
      (2 * offload.queue_depth.value_or(kQueueDepth) + 1) * piece;
}

std::vector<const RecordPool*> MemoryPlan::pools_in_files() const {
  std::vector<const RecordPool*> pools = {&records_.parameters, &records_.states, &records_.tensor_states,
                                          &records_.gradients};
  std::erase_if(pools, [](const RecordPool* pool) { return pool->records == 0 || pool->pinned_bytes > 0; });
  return pools;
}

std::int64_t MemoryPlan::records_on_disk() const {
  std::int64_t records = 0;
  for (const RecordPool* pool : pools_in_files()) records += pool->records;
  return records;
}

}  // namespace tessera
