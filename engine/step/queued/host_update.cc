#include "engine/step/queued/host_update.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "engine/memory/records/record_places.h"
#include "engine/memory/state_views.h"
#include "engine/step/rules/naming.h"
#include "runtime/base/log.h"
#include "runtime/base/process/on_threads.h"
#include "runtime/base/state_dtype.h"
#include "tessera/span.h"

namespace tessera {
namespace {

bool reads_parameter(const FlatGroup& group) { return holds_masters(group.master_kind, group.dtype); }

/// Returns where the parameter of the part's first element lies on the GPU.
std::byte* parameter_on_gpu(const FlatGroup& group, Extent part) {
  return group.shard + (part.offset - group.parameter_part.offset) * group.element_bytes();
}

}  // namespace

std::size_t host_update_threads() { return static_cast<std::size_t>(at::get_num_threads()); }

HostUpdate::HostUpdate(const QueuedContext& context)
    : memory_(context.memory.gpu.host_copies),
      gradients_(context.memory.gpu.gradients),
      kernels_(context.kernels),
      elements_(context.strategy, context.own_rules, context.rates),
      threads_(context.own_rules.elements ? 1 : host_update_threads()),
      parameter_records_(context.memory.records.parameters ? places_of(*context.memory.records.parameters)
                                                           : std::vector<std::span<std::byte>>()) {
  const std::vector<std::span<std::byte>> places = places_of(*context.memory.records.states);
  std::byte* place = memory_.get();
  first_of_unit_.push_back(0);
  for (const auto& unit : context.units) {
    float* sums = gradients_ ? gradients_->sums_on_host(*unit) : nullptr;
    for (const auto& flat : unit->groups) {
      if (!flat->trainable) continue;
      const std::int64_t before = flat->records.before_records();
      const Extent part{flat->optimizer_part.offset + before, flat->optimizer_part.numel - before};
      const Extent on_gpu =
          intersect(part, {flat->parameter_part.offset, flat->parameters_below.chunks.before_records()});
      Group& group = groups_.emplace_back(Group{flat.get(), part, steps_.size(), on_gpu, nullptr, false, nullptr, {}});
      steps_.resize(steps_.size() + flat->parameters.size());
      take_copies(group, place, sums);
      for (std::int64_t record = flat->states_below.first_record;
           record < flat->states_below.first_record + flat->records.records(); ++record)
        group.records.push_back(places[static_cast<std::size_t>(record)].data());
    }
    first_of_unit_.push_back(groups_.size());
  }
  TORCH_INTERNAL_ASSERT(place == memory_.get() + context.memory.gpu.host_copies_bytes);
}

HostUpdate::~HostUpdate() {
  try {
    if (last_came_) last_came_->wait();
    if (last_sent_) last_sent_->wait();
  } catch (const std::exception& error) {
    log_error(std::string("gradients and parameters on their way between GPU and host: ") + error.what());
  }
}

/// `sums` points to the group's sums if they lie on the host, and is null otherwise. The function moves the pointer
/// behind these sums.
void HostUpdate::take_copies(Group& group, std::byte*& place, float*& sums) const {
  FlatGroup& flat = *group.group;
  if (sums) {
    group.has_sums_here = true;
    group.gradient = sums + (group.part.offset - flat.gradient_part.offset);
    sums += flat.gradient_part.numel;
  } else {
    group.gradient = reinterpret_cast<float*>(place);
    place += group.part.numel * 4;
  }
  group.parameter = place;
  place += group.on_gpu.numel * flat.element_bytes();
}

void HostUpdate::fetch(const Unit& unit) {
  if (!fetches_) return;
  const auto index = static_cast<std::size_t>(unit.index);
  for (std::size_t i = first_of_unit_[index]; i < first_of_unit_[index + 1]; ++i) {
    Group& group = groups_[i];
    if (group.part.numel == 0 || group.has_sums_here) continue;
    const float* const sum = group.group->gradient + (group.part.offset - group.group->gradient_part.offset);
    group.gradient_came = download(group.gradient, sum, group.part.numel * 4);
  }
}

std::shared_ptr<DeviceKernels::Mark> HostUpdate::download(void* pinned, const void* device, std::int64_t bytes) {
  last_came_ = kernels_.download(static_cast<std::byte*>(pinned), device, static_cast<std::size_t>(bytes));
  copied_.to_host += bytes;
  return last_came_;
}

void HostUpdate::fetch_parameters() {
  for (auto group = groups_.rbegin(); group != groups_.rend(); ++group) {
    const FlatGroup& flat = *group->group;
    if (group->on_gpu.numel == 0 || !reads_parameter(flat)) continue;
    group->parameter_came =
        download(group->parameter, parameter_on_gpu(flat, group->on_gpu), group->on_gpu.numel * flat.element_bytes());
  }
}

void HostUpdate::begin(std::span<const char> used) {
  read_ = kernels_.mark();
  for (Group& group : groups_) {
    group.runs.clear();
    elements_.find_runs(*group.group, group.part, used.subspan(group.first_parameter),
                        steps_.data() + group.first_parameter, group.runs);
  }
}

void HostUpdate::update(std::size_t index, const UpdateRates& rates) {
  Group& group = groups_[index];
  if (group.runs.empty()) return;
  const Span span("update on the host", group.group->unit->name);
  wait_for_gradients(group);
  pass_over(group, [&](const OptimizerSlice& slice, const UpdateRun& run) {
    naming("unit", group.group->unit->name, [&] { elements_.update(elements_.optimizer_of(run), slice, rates, run); });
  });
  send(group, /*swaps=*/false);
}

void HostUpdate::wait_for_gradients(Group& group) const {
  const Unit& unit = *group.group->unit;
  const auto came = group.has_sums_here ? gradients_->copied_out(unit) : std::exchange(group.gradient_came, nullptr);
  TORCH_INTERNAL_ASSERT(came, "unit ", unit.name, " has no gradients on the host");
  came->wait();
}

void HostUpdate::swap_averages(std::size_t index) {
  Group& group = groups_[index];
  if (group.runs.empty()) return;
  pass_over(group, [&](const OptimizerSlice& slice, const UpdateRun& run) {
    elements_.optimizer_of(run).swap_average(slice);
  });
  send(group, /*swaps=*/true);
}

/// Cuts the group's runs into pieces for threads. The result of an element's update does not depend on where a piece
/// begins.
void HostUpdate::cut(const Group& group) {
  const FlatGroup& flat = *group.group;
  const std::int64_t begin = flat.optimizer_part.offset;
  pieces_.clear();
  for (const UpdateRun& run : group.runs) {
    for (Extent rest = run.extent; rest.numel > 0;) {
      const std::int64_t chunk = flat.records.chunk_of(rest.offset - begin);
      const Extent place = flat.records.chunk(chunk);
      const std::int64_t in_chunk = rest.offset - begin - place.offset;
      const std::int64_t end = std::min((in_chunk / kHostPiece + 1) * kHostPiece, place.numel);
      const Extent extent = intersect(rest, {rest.offset, end - in_chunk});
      cut_by_parameters(group, extent, chunk, run);
      rest = {extent.end(), rest.end() - extent.end()};
    }
  }
}

void HostUpdate::cut_by_parameters(const Group& group, Extent extent, std::int64_t chunk, const UpdateRun& run) {
  const FlatGroup& flat = *group.group;
  for_each_parameter_piece(flat, extent, Direction::kForward, [&](const ParameterPiece& piece) {
    std::byte* parameter = nullptr;
    if (piece.record == ParameterPiece::kNoRecord) {
      parameter = group.parameter + (piece.run.offset - group.on_gpu.offset) * flat.element_bytes();
    } else {
      parameter = parameter_records_[static_cast<std::size_t>(piece.record)].data() + piece.offset;
    }
    pieces_.push_back({piece.run, chunk, &run, parameter});
  });
}

OptimizerSlice HostUpdate::slice_of(const Group& group, const Piece& piece) const {
  const FlatGroup& flat = *group.group;
  const std::int64_t at = piece.extent.offset - group.part.offset;
  std::byte* const record = group.records[static_cast<std::size_t>(piece.chunk - flat.records.first_record())];
  StateView view = states_in_record(flat, piece.chunk, piece.extent, record);
  point_at_parameters(view, flat, piece.parameter);
  OptimizerSlice slice = optimizer_slice(flat, view);
  slice.gradient = {group.gradient + at, static_cast<std::size_t>(piece.extent.numel)};
  return slice;
}

void HostUpdate::pass_over(Group& group, Visit visit) {
  if (group.parameter_came) group.parameter_came->wait();
  if (group.sent) group.sent->wait();
  if (!parameter_records_.empty()) read_->wait();  // queued work may still read the records
  cut(group);
  on_threads(pieces_.size(), threads_, [&](std::size_t i) { visit(slice_of(group, pieces_[i]), *pieces_[i].run); });
}

/// Copies a group's new parameters to the GPU. Unchanged values are not copied, since they were perhaps never copied to
/// the host.
void HostUpdate::send(Group& group, bool swaps) {
  const FlatGroup& flat = *group.group;
  uploads_.clear();
  for (const UpdateRun& run : group.runs) {
    if (!run.is_updated && !swaps) continue;
    const Extent on_gpu = intersect(run.extent, group.on_gpu);
    if (on_gpu.numel == 0) continue;
    const std::int64_t bytes = on_gpu.numel * flat.element_bytes();
    uploads_.push_back({parameter_on_gpu(flat, on_gpu),
                        group.parameter + (on_gpu.offset - group.on_gpu.offset) * flat.element_bytes(),
                        static_cast<std::size_t>(bytes)});
    copied_.to_gpu += bytes;
  }
  if (uploads_.empty()) return;
  group.sent = last_sent_ = kernels_.upload(uploads_, read_.get());
  group.sent->join();
}

}  // namespace tessera
