#include "engine/step/agree/loss_spikes.h"

#include <algorithm>
#include <cmath>

namespace tessera {

LossSpikes::LossSpikes(const SpikeConfig& config)
    : factor_(config.factor),
      size_(static_cast<std::size_t>(config.window)),
      most_in_a_row_(std::max<std::int64_t>(1, config.window / 2)),
      losses_(size_),
      sorted_(size_) {}

LossSpikes::Verdict LossSpikes::add(double loss) {
  median_ = count_ == size_ ? find_median() : 0;
  const bool is_high = count_ == size_ && loss > factor_ * median_;
  if (is_high && in_a_row_ < most_in_a_row_) {
    ++in_a_row_;
    return Verdict::kSpike;
  }
  if (is_high) count_ = next_ = 0;
  in_a_row_ = 0;
  push(loss);
  return is_high ? Verdict::kChanged : Verdict::kNone;
}

void LossSpikes::push(double loss) {
  if (!std::isfinite(loss)) return;
  losses_[next_] = loss;
  next_ = (next_ + 1) % size_;
  count_ = std::min(count_ + 1, size_);
}

double LossSpikes::find_median() {
  sorted_ = losses_;  // of the same size: nothing is allocated
  const auto middle = sorted_.begin() + static_cast<std::ptrdiff_t>(size_ / 2);
  std::nth_element(sorted_.begin(), middle, sorted_.end());
  if (size_ % 2 == 1) return *middle;
  const double below = *std::max_element(sorted_.begin(), middle);
  return below + (*middle - below) / 2;
}

SpikeHistory LossSpikes::history() const {
  SpikeHistory history{{}, in_a_row_};
  const std::size_t oldest = next_ + size_ - count_;
  for (std::size_t i = 0; i < count_; ++i) history.losses.push_back(losses_[(oldest + i) % size_]);
  return history;
}

void LossSpikes::restore(const SpikeHistory& history) {
  count_ = next_ = 0;
  in_a_row_ = history.spikes_in_a_row;
  median_ = 0;
  const std::size_t left_out = history.losses.size() - std::min(history.losses.size(), size_);
  for (std::size_t i = left_out; i < history.losses.size(); ++i) push(history.losses[i]);
}

}  // namespace tessera
