#include "tests/golden_steps/written_plan.h"

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>

namespace tessera::testing {
namespace {

void write_memory(const std::string& what, const MemoryPlan& plan, GoldenFile::Lines& lines) {
  Line memory(what + "memory");
  for (std::size_t i = 0; i < kMemoryCategories; ++i) {
    const auto category = static_cast<MemoryCategory>(i);
    memory.add(name_of(category).c_str(), plan.use()[category]);
  }
  memory.add("total", plan.use().total()).add("limited", plan.use().limited()).to(lines);
  Line(what + "disk")
      .add("bytes", plan.records().disk.bytes)
      .add("read in two steps", plan.records().disk.read_in_two_steps)
      .add("written in two steps", plan.records().disk.written_in_two_steps)
      .add("durable", plan.records().disk.durable_bytes)
      .add("written in a commit", plan.records().disk.written_in_commit)
      .add("records", plan.records_on_disk())
      .to(lines);
}

void write_gathers(const std::string& what, const MemoryPlan& plan, GoldenFile::Lines& lines) {
  Line(what + "slots")
      .add("gathers", plan.gathers())
      .add("shared", plan.slots().shared_slots)
      .add("bytes", plan.slots().slot_bytes)
      .to(lines);
  Line gathers(what + "gathers");
  for (std::size_t unit = 0; unit < plan.units().size(); ++unit)
    gathers.add(plan.units()[unit].name.c_str(), plan.gathers_in_step(unit));
  gathers.to(lines);
  const HostStepBytes over_bus = plan.updated_over_bus();
  Line(what + "parameters below")
      .add("are below", plan.parameters_below())
      .add("on host", plan.parameters_on_host())
      .add("uploaded", plan.slots().uploaded_bytes)
      .add("pieces", plan.slots().upload_pieces())
      .add("bytes of a piece", plan.slots().upload_piece_bytes)
      .add("written over the bus", over_bus.to_host)
      .add("read over the bus", over_bus.to_gpu)
      .to(lines);
}

void write_reductions(const std::string& what, const MemoryPlan& plan, GoldenFile::Lines& lines) {
  Line(what + "buckets")
      .add("mode", static_cast<std::int64_t>(plan.sums().bucket_mode))
      .add("shared", plan.sums().shared_buckets)
      .add("bytes", plan.sums().bucket_bytes)
      .add("bytes of an element", static_cast<std::int64_t>(size_of(plan.bucket_dtype())))
      .add("reduction lag", plan.sums().reduction_lag)
      .add("end lag", plan.sums().end_lag)
      .add("units under way", plan.sums().units_under_way())
      .add("scratch", plan.sums().scratch_numel)
      .to(lines);
  Line(what + "sums")
      .add("shared", plan.sums().shared_sums)
      .add("bytes", plan.sums().sum_bytes)
      .add("notes", plan.sums().notes_numel)
      .add("are below", plan.gradients_below())
      .add("to host", plan.records().gradient_copies.to_host)
      .add("to GPU", plan.records().gradient_copies.to_gpu)
      .to(lines);
  Line(what + "kept gradients")
      .add("of all", plan.sums().kept_gradient_numel)
      .add("work", plan.sums().method_work_numel)
      .to(lines);
}

void write_matrices(const std::string& what, const MemoryPlan& plan, GoldenFile::Lines& lines) {
  const MatrixDeal& deal = plan.passes().matrices;
  Line(what + "matrices")
      .add("dealt", std::ssize(deal.matrices()))
      .add("batches", std::ssize(deal.batches()))
      .add("bytes", plan.matrix_bytes())
      .add("exchanged", deal.exchange_numel())
      .add("work", deal.work_numel())
      .add("own masters", plan.own_masters_numel())
      .add("parameters twice", plan.passes().first_pass.parameters)
      .add("states twice", plan.passes().first_pass.states)
      .to(lines);
  for (const MatrixBatch& batch : deal.batches()) {
    Line(what + "batch up to unit " + std::to_string(batch.end_unit))
        .add("matrices", static_cast<std::int64_t>(batch.end - batch.begin))
        .add("collected", batch.collected)
        .add("returned", batch.returned)
        .to(lines);
  }
  Line owners(what + "owners");
  for (const DealtMatrix& matrix : deal.matrices())
    owners.add((std::to_string(matrix.unit) + "." + std::to_string(matrix.tensor)).c_str(), matrix.owner);
  owners.to(lines);
  Line(what + "tensor states")
      .add("in memory", plan.records().tensor_states_in_memory)
      .add("of a batch", plan.records().tensor_states_of_a_batch)
      .add("ahead", plan.records().tensor_states_ahead())
      .to(lines);
}

void write_update(const std::string& what, const MemoryPlan& plan, GoldenFile::Lines& lines) {
  Line(what + "update")
      .add("passes twice", plan.passes_twice())
      .add("whole records", plan.has_whole_records())
      .add("steps on host", plan.passes().steps_on_host)
      .add("could step on host", plan.can_step_on_host())
      .add("streamed", plan.records().streamed_bytes)
      .add("to host", plan.passes().host_step.to_host)
      .add("to GPU", plan.passes().host_step.to_gpu)
      .add("copies of the host", plan.passes().host_copies_bytes)
      .add("copy of weights", plan.passes().weight_copy_bytes)
      .add("queue depth", plan.records().queue_depth)
      .add("most records of a unit", plan.most_records_of_a_unit())
      .to(lines);
  Line(what + "outer steps")
      .add("part", plan.passes().outer.part)
      .add("largest", plan.passes().outer.largest)
      .add("sent", plan.passes().outer.sent)
      .to(lines);
  Line(what + "image").add("bytes", plan.records().image_bytes).add("queue depth", plan.image_queue_depth()).to(lines);
}

void write_pool(const std::string& what, const RecordPool& pool, GoldenFile::Lines& lines) {
  if (pool.records == 0) return;
  Line(what)
      .add("records", pool.records)
      .add("bytes of one", pool.record_bytes)
      .add("cached", pool.cached)
      .add("cached first", pool.cached_first)
      .add("slots", pool.slots)
      .add("held", pool.held)
      .add("slots of the GPU", pool.device_slots)
      .add("pinned", pool.pinned_bytes)
      .to(lines);
}

/// Writes a group's own part of the plan.
void write_group(const std::string& what, const MemoryPlan& plan, const GroupShape& group, GoldenFile::Lines& lines) {
  const RecordLayout records = plan.records_of(group);
  const Chunks parameters = plan.parameter_chunks_of(group);
  const FeedbackNumel feedback = plan.feedback_numel_of(group);
  const MethodMemory method = plan.method_layout_of(group).memory;
  Line(what)
      .add("part", records.numel())
      .add("before records", records.before_records())
      .add("records", records.records())
      .add("masters in memory", records.masters_in_memory())
      .add("states in memory", records.states_in_memory())
      .add("parameters before records", parameters.before_records())
      .add("records of parameters", parameters.records())
      .add("tensor states", plan.tensor_state_part_of(group).numel)
      .add("feedback of shards", feedback.shard)
      .add("feedback of replicas", feedback.replicate)
      .add("kept by the method", method.kept)
      .add("work of the method", method.work)
      .to(lines);
}

/// Writes the groups of all units. A unit with the same plan as the unit before it gets no lines.
void write_groups(const std::string& what, const MemoryPlan& plan, GoldenFile::Lines& lines) {
  GoldenFile::Lines before;
  for (const UnitShape& unit : plan.units()) {
    GoldenFile::Lines groups;
    for (const GroupShape& group : unit.groups)
      write_group(group.trainable ? "group" : "frozen group", plan, group, groups);
    if (groups == before) continue;
    for (const std::string& line : groups) lines.push_back(what + unit.name + " " + line);
    before = std::move(groups);
  }
}

void write_wire(const std::string& what, const PredictedWire& wire, GoldenFile::Lines& lines) {
  Line(what)
      .add("calls", wire.calls)
      .add("sent bytes", wire.sent_bytes)
      .add_seconds("busy", wire.busy_s)
      .add_seconds("latency", wire.latency_s)
      .add_seconds("transfer", wire.transfer_s)
      .to(lines);
}

}  // namespace

void write_plan(const std::string& what, const MemoryPlan& plan, GoldenFile::Lines& lines) {
  const std::string begin = what + " ";
  write_memory(begin, plan, lines);
  write_gathers(begin, plan, lines);
  write_reductions(begin, plan, lines);
  write_matrices(begin, plan, lines);
  write_update(begin, plan, lines);
  write_pool(begin + "records of parameters", plan.records().parameters, lines);
  write_pool(begin + "records of states", plan.records().states, lines);
  write_pool(begin + "records of tensor states", plan.records().tensor_states, lines);
  write_pool(begin + "records of gradients", plan.records().gradients, lines);
  write_pool(begin + "records of the image", plan.records().image, lines);
  write_groups(begin, plan, lines);
}

void write_step(const std::string& what, const PredictedStep& step, GoldenFile::Lines& lines) {
  Line(what)
      .add_seconds("step", step.seconds)
      .add_seconds("compute", step.compute_s)
      .add_seconds("update", step.update_s)
      .add_seconds("rest", step.rest_s)
      .add_seconds("stretch", step.stretch_s)
      .add_seconds("gathers", step.exposed_gather_s)
      .add_seconds("reductions", step.exposed_reduction_s)
      .add_seconds("publication", step.exposed_publish_s)
      .add_seconds("agreement", step.agreement_s)
      .add_seconds("outer", step.exposed_outer_s)
      .add("bound", static_cast<std::int64_t>(step.bound))
      .to(lines);
  write_wire(what + ", shard axis", step.shard, lines);
  write_wire(what + ", replicate axis", step.replicate, lines);
}

}  // namespace tessera::testing
