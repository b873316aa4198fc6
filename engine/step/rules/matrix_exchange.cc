#include "engine/step/rules/matrix_exchange.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>

#include "runtime/border/throw.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"
#include "tessera/span.h"

namespace tessera {
namespace {

float* gradients_at(const FlatGroup& group, Extent piece) {
  return group.gradient + (piece.offset - group.gradient_part.offset);
}

}  // namespace

MatrixExchange::MatrixExchange(const StepContext& context, const MasterAssigner* masters, ComputeDevice device,
                               DeviceKernels* kernels)
    : deal_(context.plan.passes().matrices),
      units_(context.units),
      masters_(masters),
      world_(context.axes.world),
      device_(device),
      kernels_(kernels),
      sent_(reinterpret_cast<float*>(context.memory.matrices.data())),
      received_(sent_ + deal_.exchange_numel()),
      work_(received_ + deal_.exchange_numel(), static_cast<std::size_t>(deal_.work_numel())),
      own_masters_(work_.data() + work_.size(), static_cast<std::size_t>(context.plan.own_masters_numel())),
      read_(static_cast<std::size_t>(world_->size())),
      written_(read_) {}

void MatrixExchange::run(const MatrixBatch& batch, VisitMasters visit_masters,
                         c10::function_ref<void(const DealtMatrix&, const WholeMatrix&)> compute) {
  collect(batch, visit_masters);
  {
    const float* own_masters = own_masters_.data();
    const Span span("whole matrices");
    Messages from(received_, batch.collected, read_), to(sent_, batch.returned, written_);
    for (const DealtMatrix& matrix : deal_.matrices_of(batch)) {
      if (matrix.owner != world_->rank()) continue;
      const WholeMatrix whole = join(matrix, from, own_masters);
      compute(matrix, whole);
      cut(matrix, whole, to);
    }
  }
  take_back(batch);
}

float* MatrixExchange::Messages::next(int rank, std::int64_t numel) {
  std::int64_t& used = used_[static_cast<std::size_t>(rank)];
  float* const begin = begin_ + rank * numel_ + used;
  used += numel;
  return begin;
}

void MatrixExchange::exchange(const char* label, std::int64_t numel_per_rank) {
  const Span span("matrices", label, &seconds_);
  const auto bytes = static_cast<std::size_t>(numel_per_rank) * sizeof(float);
  if (bytes > 0) {
    Work work = world_->all_to_all(label, sent_, received_, bytes);
    const Timed timed(device_.waits);
    throw_if_error(work.wait());
  }
  std::ranges::fill(read_, 0);
  std::ranges::fill(written_, 0);
}

void MatrixExchange::read_masters(const FlatGroup& group, const StateView& view, Extent piece, float* to) const {
  const OptimizerSlice slice = optimizer_slice(group, view);
  const auto begin = static_cast<std::size_t>(piece.offset - view.run.offset);
  const auto count = static_cast<std::size_t>(piece.numel);
  if (!device_.is_queued) return masters_->read(slice, begin, count, to);
  DeviceRun run;
  run.arguments = part_of(masters_->arguments(slice), begin, count);
  run.first_element = slice.first_element + begin;
  read_by_kernel(run, to);
}

/// Kernels write whole vectors, but a piece of a message may begin at any element. A piece that does not begin at a
/// vector boundary is copied through a little memory that is not in the plan.
void MatrixExchange::read_by_kernel(DeviceRun run, float* to) const {
  constexpr std::size_t kVector = 16;  // bytes
  constexpr std::size_t kPortion = std::size_t{1} << 20;
  const Unrecorded unrecorded;
  if (reinterpret_cast<std::uintptr_t>(to) % kVector == 0) return kernels_->read_weights(run, to);
  const std::size_t numel = run.arguments.numel;
  for (std::size_t begin = 0; begin < numel; begin += kPortion) {
    const std::size_t count = std::min(kPortion, numel - begin);
    const auto length = static_cast<std::int64_t>(count);
    const at::Tensor masters = at::empty({length}, at::device(device_.device).dtype(at::kFloat));
    DeviceRun portion = run;
    portion.arguments = part_of(run.arguments, begin, count);
    portion.first_element += begin;
    kernels_->read_weights(portion, masters.data_ptr<float>());
    copy(masters.data_ptr<float>(), length, to + begin);
  }
}

void MatrixExchange::copy(const float* from, std::int64_t numel, float* to) const {
  if (numel == 0) return;
  if (!device_.is_queued) {
    std::copy_n(from, numel, to);
    return;
  }
  const Unrecorded unrecorded;
  const auto view = [&](float* values) { return flat_view(values, DType::kF32, numel, device_.device); };
  view(to).copy_(view(const_cast<float*>(from)));
}

MatrixExchange::Held MatrixExchange::collected_from(const DealtMatrix& matrix, int rank) const {
  return {deal_.collected_piece(matrix, rank), deal_.collected_states(matrix, rank)};
}

MatrixExchange::Held MatrixExchange::returned_to(const DealtMatrix& matrix, int rank) const {
  return {deal_.returned_piece(matrix, rank), deal_.returned_states(matrix, rank)};
}

void MatrixExchange::read_own(const DealtMatrix& matrix, Held own, float* gradient, float* states) const {
  const FlatGroup& group = group_of(matrix);
  copy(gradients_at(group, own.piece), own.piece.numel, gradient);
  copy(group.tensor_state_at(own.states.offset), own.states.numel, states);
}

void MatrixExchange::write_own(const DealtMatrix& matrix, Held own, const float* result, const float* states) const {
  const FlatGroup& group = group_of(matrix);
  copy(result, own.piece.numel, gradients_at(group, own.piece));
  copy(states, own.states.numel, group.tensor_state_at(own.states.offset));
}

/// Sends this rank's parts to the owners.
void MatrixExchange::collect(const MatrixBatch& batch, VisitMasters visit_masters) {
  const std::span<const DealtMatrix> matrices = deal_.matrices_of(batch);
  Messages to(sent_, batch.collected, written_);
  float* own_masters = own_masters_.data();
  places_.clear();
  for (const DealtMatrix& matrix : matrices) {
    const Held own = collected_from(matrix, world_->rank());
    if (matrix.owner == world_->rank()) {  // `join` reads this part where it lies; only masters are read now
      places_.push_back(own_masters_.empty() ? nullptr : own_masters);
      if (!own_masters_.empty()) own_masters += MatrixDeal::in_whole_lines(own.piece.numel);
      continue;
    }
    float* const gradient = to.next(matrix.owner, own.piece.numel);
    places_.push_back(masters_ ? to.next(matrix.owner, own.piece.numel) : nullptr);
    read_own(matrix, own, gradient, to.next(matrix.owner, own.states.numel));
  }
  for (std::size_t begin = 0, end = 0; masters_ && begin < matrices.size(); begin = end) {
    while (end < matrices.size() && &group_of(matrices[end]) == &group_of(matrices[begin])) ++end;
    collect_masters(matrices.subspan(begin, end - begin), std::span(places_).subspan(begin), visit_masters);
  }
  exchange("matrices to owners", batch.collected);
}

/// Reads masters in one pass over the group. `places`: the address to which the masters of each matrix are written;
/// null if they are not needed now.
void MatrixExchange::collect_masters(std::span<const DealtMatrix> of_group, std::span<float* const> places,
                                     VisitMasters visit_masters) const {
  const FlatGroup& group = group_of(of_group.front());
  visit_masters(group, [&](const StateView& view) {
    for (std::size_t i = 0; i < of_group.size(); ++i) {
      const Extent own = collected_from(of_group[i], world_->rank()).piece;
      const Extent piece = intersect(own, view.run);
      if (places[i] && piece.numel > 0) read_masters(group, view, piece, places[i] + (piece.offset - own.offset));
    }
  });
}

/// Joins a whole matrix from the parts of all ranks. `own_masters` points to this rank's own masters of the matrix,
/// which are not sent. The function moves this pointer behind them.
WholeMatrix MatrixExchange::join(const DealtMatrix& matrix, Messages& from, const float*& own_masters) {
  std::span<float> rest = work_;
  const auto take = [&](std::int64_t numel) {
    const auto count = static_cast<std::size_t>(numel);
    const std::span<float> taken = rest.first(count);
    rest = rest.subspan(static_cast<std::size_t>(MatrixDeal::in_whole_lines(numel)));
    return taken;
  };
  WholeMatrix whole;
  whole.gradient = take(matrix.extent.numel);
  if (masters_) whole.masters = take(matrix.extent.numel);
  whole.states = take(matrix.states.numel);
  whole.work = rest;
  for (int rank = 0; rank < world_->size(); ++rank) {
    const Held held = collected_from(matrix, rank);
    float* const gradient = whole.gradient.data() + (held.piece.offset - matrix.extent.offset);
    float* const masters = masters_ ? whole.masters.data() + (held.piece.offset - matrix.extent.offset) : nullptr;
    float* const states = whole.states.data() + (held.states.offset - matrix.states.offset);
    if (rank == world_->rank()) {
      read_own(matrix, held, gradient, states);
      if (!own_masters_.empty()) {
        copy(own_masters, held.piece.numel, masters);
        own_masters += MatrixDeal::in_whole_lines(held.piece.numel);
      } else if (masters_ && held.piece.numel > 0) {
        const FlatGroup& group = group_of(matrix);
        read_masters(group, states_in_memory(group, held.piece), held.piece, masters);
      }
      continue;
    }
    copy(from.next(rank, held.piece.numel), held.piece.numel, gradient);
    if (masters_) copy(from.next(rank, held.piece.numel), held.piece.numel, masters);
    copy(from.next(rank, held.states.numel), held.states.numel, states);
  }
  return whole;
}

void MatrixExchange::cut(const DealtMatrix& matrix, const WholeMatrix& whole, Messages& to) const {
  const std::span<float> results = masters_ ? whole.masters : whole.gradient;
  for (int rank = 0; rank < world_->size(); ++rank) {
    const Held held = returned_to(matrix, rank);
    const float* const result = results.data() + (held.piece.offset - matrix.extent.offset);
    const float* const states = whole.states.data() + (held.states.offset - matrix.states.offset);
    if (rank == world_->rank()) {
      write_own(matrix, held, result, states);
      continue;
    }
    copy(result, held.piece.numel, to.next(rank, held.piece.numel));
    copy(states, held.states.numel, to.next(rank, held.states.numel));
  }
}

void MatrixExchange::take_back(const MatrixBatch& batch) {
  exchange("matrices from owners", batch.returned);
  Messages from(received_, batch.returned, read_);
  for (const DealtMatrix& matrix : deal_.matrices_of(batch)) {
    if (matrix.owner == world_->rank()) continue;  // `cut` has written this rank's part already
    const Held own = returned_to(matrix, world_->rank());
    const float* const result = from.next(matrix.owner, own.piece.numel);
    write_own(matrix, own, result, from.next(matrix.owner, own.states.numel));
  }
  std::ranges::fill(read_, 0);
}

}  // namespace tessera
