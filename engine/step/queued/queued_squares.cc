#include "engine/step/queued/queued_squares.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "sharding/unrecorded.h"

namespace tessera {
namespace {

std::uint32_t blocks_of(std::int64_t numel) {
  return static_cast<std::uint32_t>((static_cast<std::uint64_t>(numel) + kSquaredBlock - 1) / kSquaredBlock);
}

/// Returns the most blocks that one launch may have: those of the largest unit.
std::size_t most_blocks(const std::vector<std::unique_ptr<Unit>>& units) {
  std::size_t most = 0;
  for (const auto& unit : units) {
    std::size_t blocks = 0;
    for (const auto& group : unit->groups) {
      if (!group->trainable) continue;
      for (std::size_t i = 0; i < group->parameters.size(); ++i) blocks += blocks_of(group->layout.extent(i).numel);
    }
    most = std::max(most, blocks);
  }
  return most;
}

}  // namespace

QueuedSquares::QueuedSquares(const std::vector<std::unique_ptr<Unit>>& units, at::Tensor of_step,
                             DeviceKernels& kernels, c10::Device device)
    : kernels_(kernels),
      tables_(device),
      is_measured_(tables_.take<std::uint8_t>(units.size())),
      of_step_(std::move(of_step)) {
  launch_.block_sums = tables_.take<double>(most_blocks(units));
  launch_.unit_sum = tables_.take<double>(1);
  launch_.sum = tables_.take<double>(1);
  const auto options = at::TensorOptions().device(device);
  sum_ = at::from_blob(launch_.sum, {1}, options.dtype(at::kDouble));
  measured_ = at::from_blob(is_measured_, {static_cast<std::int64_t>(units.size())}, options.dtype(at::kByte));
}

void QueuedSquares::add(const Unit& unit, std::span<const GradientPiece> pieces, DType dtype) {
  if (pieces.empty()) return;
  has_some_ = true;
  launch_.dtype = dtype;
  launch_.is_measured = is_measured_ + unit.index;
  launch_.begins = true;
  while (!pieces.empty()) {
    const std::size_t count = std::min<std::size_t>(pieces.size(), OwnPieces::kMost);
    launch_.count = static_cast<std::uint32_t>(count);
    launch_.blocks = 0;
    for (std::size_t i = 0; i < count; ++i) {
      launch_.pieces[i] = {pieces[i].values, static_cast<std::uint64_t>(pieces[i].numel), launch_.blocks};
      launch_.blocks += blocks_of(pieces[i].numel);
    }
    pieces = pieces.subspan(count);
    launch_.ends = pieces.empty();
    kernels_.own_squares(launch_);
    launch_.begins = false;
  }
}

void QueuedSquares::take() {
  if (!has_some_) return;
  {
    const Unrecorded unrecorded;
    of_step_.add_(sum_);
  }
  forget();
}

void QueuedSquares::forget() {
  if (!std::exchange(has_some_, false)) return;
  const Unrecorded unrecorded;
  sum_.zero_();
  measured_.zero_();
}

}  // namespace tessera
