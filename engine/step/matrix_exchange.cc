#include "engine/step/matrix_exchange.h"

#include <algorithm>

#include "engine/step/orthogonalize.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {

MatrixExchange::MatrixExchange(const MatrixDeal& deal, const std::vector<std::unique_ptr<Unit>>& units,
                               const Arena& memory, std::int64_t steps, std::shared_ptr<Collectives> world)
    : deal_(deal),
      units_(units),
      steps_(steps),
      world_(std::move(world)),
      sent_(reinterpret_cast<float*>(memory.data())),
      received_(sent_ + deal.exchange_numel()),
      work_(received_ + deal.exchange_numel(), static_cast<std::size_t>(deal.work_numel())),
      read_(static_cast<std::size_t>(world_->size())),
      written_(read_) {}

void MatrixExchange::run(const MatrixBatch& batch, c10::function_ref<float(const DealtMatrix&)> factor_of) {
  collect(batch);
  {
    const Span span("orthogonalize");
    for (const DealtMatrix& matrix : deal_.matrices_of(batch)) {
      if (matrix.owner == world_->rank()) compute(matrix, batch, factor_of(matrix));
    }
  }
  send_back(batch);
}

float* MatrixExchange::gradient(const DealtMatrix& matrix, Extent piece) const {
  const FlatGroup& group = *units_[matrix.unit]->groups[matrix.group];
  return group.gradient + (piece.offset - group.gradient_part.offset);
}

void MatrixExchange::exchange(const char* label, std::int64_t numel_per_rank) {
  const Span span("matrices", label, &seconds_);
  const auto bytes = static_cast<std::size_t>(numel_per_rank) * sizeof(float);
  throw_if_error(world_->all_to_all(label, sent_, received_, bytes).wait());
  std::ranges::fill(read_, 0);
  std::ranges::fill(written_, 0);
}

/// What this rank holds goes to owners.
void MatrixExchange::collect(const MatrixBatch& batch) {
  for (const DealtMatrix& matrix : deal_.matrices_of(batch)) {
    const Extent piece = deal_.collected_piece(matrix, world_->rank());
    std::int64_t& written = written_[static_cast<std::size_t>(matrix.owner)];
    std::copy_n(gradient(matrix, piece), piece.numel, sent_ + matrix.owner * batch.collected + written);
    written += piece.numel;
  }
  exchange("matrices to owners", batch.collected);
}

void MatrixExchange::compute(const DealtMatrix& matrix, const MatrixBatch& batch, float factor) {
  float* const whole = work_.data();
  for (int from = 0; from < world_->size(); ++from) {
    const Extent piece = deal_.collected_piece(matrix, from);
    std::int64_t& read = read_[static_cast<std::size_t>(from)];
    std::copy_n(received_ + from * batch.collected + read, piece.numel, whole + (piece.offset - matrix.extent.offset));
    read += piece.numel;
  }
  if (factor != 0) {
    const auto own = static_cast<std::size_t>(MatrixDeal::in_whole_lines(matrix.extent.numel));
    orthogonalize(whole, matrix.shape, steps_, work_.subspan(own));
  }
  for (int to = 0; to < world_->size(); ++to) {
    const Extent piece = deal_.returned_piece(matrix, to);
    std::int64_t& written = written_[static_cast<std::size_t>(to)];
    const float* const from = whole + (piece.offset - matrix.extent.offset);
    std::transform(from, from + piece.numel, sent_ + to * batch.returned + written,
                   [&](float x) { return x * factor; });
    written += piece.numel;
  }
}

void MatrixExchange::send_back(const MatrixBatch& batch) {
  exchange("matrices from owners", batch.returned);
  for (const DealtMatrix& matrix : deal_.matrices_of(batch)) {
    const Extent piece = deal_.returned_piece(matrix, world_->rank());
    std::int64_t& read = read_[static_cast<std::size_t>(matrix.owner)];
    std::copy_n(received_ + matrix.owner * batch.returned + read, piece.numel, gradient(matrix, piece));
    read += piece.numel;
  }
  std::ranges::fill(read_, 0);
}

}  // namespace tessera
