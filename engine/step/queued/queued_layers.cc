#include "engine/step/queued/queued_layers.h"

#include <algorithm>

#include "engine/step/agree/gradient_norm.h"
#include "engine/step/agree/step_agreement.h"
#include "engine/step/queued/queued_norm.h"
#include "optim/grad_norm.h"
#include "optim/norm_launch.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {
namespace {

NormBuffer buffer_of_part(const FlatGroup& group, const float* values) {
  return {values, norm_runs(group, group.optimizer_part)};
}

std::size_t sums_of(const NormBuffer& buffer) { return NormSums(buffer.runs).count(); }

/// Returns the tables of `buffers`. Their sums are at `sums`, in the same order.
NormTables tables_of(std::span<const NormBuffer> buffers, double* sums, DeviceTables& memory) {
  return norm_tables(norm_launch(buffers, sums, memory.take<double>(norm_scratch_count(buffers))), memory);
}

}  // namespace

QueuedLayers::QueuedLayers(const QueuedContext& context, std::span<const Part> parts, LayerNorms::Options options)
    : kernels_(context.kernels),
      device_(context.device),
      world_(context.axes.world),
      by_unit_(options.by_unit),
      memory_(device_.device),
      copy_(reinterpret_cast<float*>(context.memory.weight_copy.data())),
      copied_(parts.size()) {
  const std::vector<int> ranks_with_parts = owners_of_parts(context.plan.placement().optimizer, context.axes);
  const std::vector<LayerMeeting> all = layer_meetings(context.units, ranks_with_parts.size(), options.by_unit);
  const auto kinds = static_cast<std::size_t>(options.of_updates ? 2 : 1);
  const auto ranks = static_cast<std::size_t>(world_->size());
  std::size_t most_sums = 0, most_links = 0, most_parameters = 0;
  for (const LayerMeeting& meeting : all) {
    most_sums = std::max(most_sums, meeting.totals.most_sums());
    most_links = std::max(most_links, meeting.totals.links().size());
    most_parameters = std::max(most_parameters, meeting.numbers.size());
  }
  message_ = memory_.take<double>(kinds * most_sums);
  messages_ = ranks == 1 ? message_ : memory_.take<double>(ranks * kinds * most_sums);
  LayerTables tables;  // tables for the next Meeting
  tables.kinds = static_cast<int>(kinds);
  tables.messages = messages_;
  tables.part_ranks = memory_.put<std::int32_t>(ranks_with_parts);
  tables.link_scratch = memory_.take<double>(kinds * most_links);
  tables.squares = memory_.take<double>(kinds * most_parameters);
  for (const auto& [groups, numbers, totals] : all) {
    Meeting& meeting = meetings_.emplace_back();
    if (groups.empty()) continue;
    tables.most_sums = totals.most_sums();
    tables.parameters = static_cast<std::uint32_t>(numbers.size());
    tables.groups = static_cast<std::uint32_t>(groups.size());
    tables.links = memory_.put<NormLink>(totals.links());
    tables.first_link = memory_.put<std::uint32_t>(totals.first_link());
    tables.tensor = memory_.put<std::uint32_t>(std::vector<std::uint32_t>(numbers.begin(), numbers.end()));
    meeting.first = groups.front();
    meeting.tables = tables;
    add_weights(parts.subspan(tables.first_group, groups.size()), meeting);
    if (options.of_updates) add_updates(groups, meeting);
    tables.first_parameter += tables.parameters;
    tables.first_group += tables.groups;
  }
}

/// The unsplit masters of neighbouring parts are added up together. Split masters are added up one group at a time.
void QueuedLayers::add_weights(std::span<const Part> parts, Meeting& meeting) {
  double* sums = message_;
  std::vector<NormBuffer> together;
  const auto add_together = [&] {
    if (together.empty()) return;
    meeting.weights.push_back(tables_of(together, sums, memory_));
    for (const NormBuffer& buffer : together) sums += sums_of(buffer);
    together.clear();
  };
  std::size_t index = meeting.tables.first_group;
  for (const Part& part : parts) {
    NormTables& copied = copied_[index++];
    if (part.is_copied) {
      add_together();
      const NormBuffer buffer = buffer_of_part(*part.group, copy_);
      copied = tables_of({&buffer, 1}, sums, memory_);
      sums += sums_of(buffer);
      continue;
    }
    if (part.weights.weights != WeightFormat::kSplitBF16) {
      together.push_back(buffer_of_part(*part.group, part.weights.master));
      continue;
    }
    add_together();
    const auto* const at = reinterpret_cast<const float*>(message_);  // the address is not read; any address will do
    const NormBuffer buffer = buffer_of_part(*part.group, at);
    NormTables& tables = meeting.weights.emplace_back(tables_of({&buffer, 1}, sums, memory_));
    tables.high = static_cast<const std::uint16_t*>(part.weights.parameter);
    tables.low = part.weights.low;
    tables.at = at;
    sums += sums_of(buffer);
  }
  add_together();
}

/// If units are updated in backward (`by_unit_`), gradients have memory only while they are in use. The tables then
/// have the addresses that updates would have if the unit's gradients began at `message_`, one after another
/// (place_gradients).
void QueuedLayers::add_updates(std::span<const FlatGroup* const> groups, Meeting& meeting) {
  const auto* place = reinterpret_cast<const float*>(message_);
  std::vector<NormBuffer> buffers;
  for (const FlatGroup* group : groups) {
    const float* const gradient = by_unit_ ? place : group->gradient;
    buffers.push_back(buffer_of_part(*group, gradient + (group->optimizer_part.offset - group->gradient_part.offset)));
    place += group->gradient_part.numel;
  }
  meeting.updates = tables_of(buffers, message_ + meeting.tables.most_sums, memory_);
}

void QueuedLayers::agree(std::optional<std::int32_t> unit, const StepRequest& request, const StepTables& tables) {
  const Meeting& meeting = meetings_[static_cast<std::size_t>(unit.value_or(0))];
  const LayerTables& own = meeting.tables;
  if (own.most_sums == 0) return;  // nothing trains
  const Span span("layer norms");
  for (const NormTables& weights : meeting.weights) kernels_.norm(weights);
  if (by_unit_) {
    kernels_.norm(moved(meeting.updates, reinterpret_cast<const float*>(message_), meeting.first->gradient));
  } else if (own.kinds > 1) {
    kernels_.norm(meeting.updates);
  }
  if (messages_ != message_) {
    const Timed timed(device_.waits);
    const std::size_t bytes = static_cast<std::size_t>(own.kinds) * own.most_sums * sizeof(double);
    throw_if_error(world_->all_gather("layer norms", message_, messages_, bytes).wait());
  }
  kernels_.adapt_rates(request, own, tables);
}

}  // namespace tessera
