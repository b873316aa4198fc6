#include "engine/step/queued/queued_layers.h"

#include "engine/step/agree/gradient_norm.h"
#include "engine/step/agree/step_agreement.h"
#include "engine/step/queued/queued_norm.h"
#include "optim/grad_norm.h"
#include "optim/norm_launch.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {
namespace {

NormBuffer buffer_of(const QueuedLayers::Part& part, const float* values) {
  return {values, norm_runs(*part.group, part.group->optimizer_part)};
}

std::size_t sums_of(const NormBuffer& buffer) { return NormSums(buffer.runs).count(); }

/// Returns the tables of `buffers`, whose sums are at `sums`, in order.
NormTables tables_of(std::span<const NormBuffer> buffers, double* sums, DeviceTables& memory) {
  return norm_tables(norm_launch(buffers, sums, memory.take<double>(norm_scratch_count(buffers))), memory);
}

}  // namespace

QueuedLayers::QueuedLayers(const QueuedContext& context, std::span<const Part> parts, bool of_directions)
    : kernels_(context.kernels),
      device_(context.device),
      world_(context.axes.world),
      memory_(device_.device),
      copy_(reinterpret_cast<float*>(context.memory.weight_copy.data())),
      copied_(parts.size()) {
  const std::vector<int> ranks_with_parts = owners_of_parts(context.plan.placement().optimizer, context.axes);
  const NormTotals totals = norm_totals(context.units, ranks_with_parts.size());
  const auto kinds = static_cast<std::size_t>(of_directions ? 2 : 1), ranks = static_cast<std::size_t>(world_->size());
  tables_.kinds = static_cast<int>(kinds);
  tables_.most_sums = totals.most_sums();
  message_ = memory_.take<double>(kinds * tables_.most_sums);
  messages_ = ranks == 1 ? message_ : memory_.take<double>(ranks * kinds * tables_.most_sums);
  tables_.messages = messages_;
  tables_.part_ranks = memory_.put<std::int32_t>(ranks_with_parts);
  tables_.links = memory_.put<NormLink>(totals.links());
  tables_.first_link = memory_.put<std::uint32_t>(totals.first_link());
  tables_.link_scratch = memory_.take<double>(kinds * totals.links().size());
  tables_.squares = memory_.take<double>(kinds * totals.tensors());
  std::vector<std::uint32_t> numbers;
  for (const Part& part : parts) {
    for (const FlatParameter& parameter : part.group->parameters) {
      numbers.push_back(static_cast<std::uint32_t>(parameter.number));
    }
  }
  tables_.tensor = memory_.put<std::uint32_t>(numbers);
  add_weights(parts);
  if (of_directions) add_directions(parts);
}

/// Adjacent masters in one piece are added together. Split masters are added one group at a time.
void QueuedLayers::add_weights(std::span<const Part> parts) {
  double* sums = message_;
  std::vector<NormBuffer> together;
  const auto add_together = [&] {
    if (together.empty()) return;
    norms_.push_back(tables_of(together, sums, memory_));
    for (const NormBuffer& buffer : together) sums += sums_of(buffer);
    together.clear();
  };
  for (const Part& part : parts) {
    const StepArguments& a = part.run.arguments;
    if (part.is_copied) {
      add_together();
      const NormBuffer buffer = buffer_of(part, copy_);
      copied_[static_cast<std::size_t>(&part - parts.data())] = tables_of({&buffer, 1}, sums, memory_);
      sums += sums_of(buffer);
      continue;
    }
    if (a.weights != WeightFormat::kSplitBF16) {
      together.push_back(buffer_of(part, a.master));
      continue;
    }
    add_together();
    const auto* const at = reinterpret_cast<const float*>(message_);  // any address will do
    const NormBuffer buffer = buffer_of(part, at);
    NormTables& tables = norms_.emplace_back(tables_of({&buffer, 1}, sums, memory_));
    tables.high = static_cast<const std::uint16_t*>(a.parameter);
    tables.low = a.low;
    tables.at = at;
    sums += sums_of(buffer);
  }
  add_together();
}

void QueuedLayers::add_directions(std::span<const Part> parts) {
  std::vector<NormBuffer> buffers;
  for (const Part& part : parts) buffers.push_back(buffer_of(part, part.run.arguments.gradient));
  norms_.push_back(tables_of(buffers, message_ + tables_.most_sums, memory_));
}

void QueuedLayers::add_copied(std::size_t part) { kernels_.norm(copied_[part]); }

void QueuedLayers::agree(const StepRequest& request, const StepTables& tables) {
  if (tables_.most_sums == 0) return;  // nothing trains
  const Span span("layer norms");
  for (const NormTables& norm : norms_) kernels_.norm(norm);
  if (messages_ != message_) {
    const Timed timed(device_.waits);
    const std::size_t bytes = static_cast<std::size_t>(tables_.kinds) * tables_.most_sums * sizeof(double);
    throw_if_error(world_->all_gather("layer norms", message_, messages_, bytes).wait());
  }
  kernels_.adapt_rates(request, tables_, tables);
}

}  // namespace tessera
