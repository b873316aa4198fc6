#include "engine/training/microbatch_dealer.h"

#include <algorithm>
#include <utility>

#include "sharding/layout/plan/microbatch_deal.h"

namespace tessera {
namespace {

constexpr double kLeastSeconds = 1e-9;  // smallest busy time that is used; clocks may show less

/// Returns the median, and may reorder `values`. If two values are in the middle, the result is the lower one.
double median_of(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::ranges::nth_element(values, middle);
  return *middle;
}

}  // namespace

MicrobatchDealer::MicrobatchDealer(const Strategy& strategy, int ranks)
    : order_(microbatch_order(strategy, ranks)),
      window_(static_cast<std::size_t>(strategy.deal.window)),
      busy_(static_cast<std::size_t>(ranks)),
      seconds_(busy_.size()),
      counts_(busy_.size()),
      before_(counts_) {
  for (std::vector<double>& each : busy_) each.reserve(window_);
  std::vector<std::int64_t> begins;
  for (int rank = 0; rank < ranks; ++rank) {
    begins.push_back(order_.run_of(rank).begin);
    counts_[static_cast<std::size_t>(rank)] = order_.count_of(rank);
  }
  order_.begins = std::move(begins);
}

bool MicrobatchDealer::add(std::span<const double> busy_seconds, std::span<const std::int64_t> computed) {
  for (std::size_t rank = 0; rank < busy_.size(); ++rank) {
    const std::int64_t count = computed.empty() ? counts_[rank] : std::max<std::int64_t>(computed[rank], 1);
    busy_[rank].push_back(std::max(kLeastSeconds, busy_seconds[rank]) / static_cast<double>(count));
  }
  if (busy_[0].size() < window_) return false;
  before_ = counts_;
  for (std::size_t rank = 0; rank < busy_.size(); ++rank) {
    seconds_[rank] = median_of(busy_[rank]);
    busy_[rank].clear();
  }
  share_out(order_, seconds_, counts_);
  if (!is_worth_a_deal(counts_, before_, seconds_)) {
    counts_ = before_;
    return false;
  }
  std::int64_t begin = 0;
  for (std::size_t rank = 0; rank < counts_.size(); ++rank) {
    order_.begins[rank] = begin;
    begin += counts_[rank];
  }
  return true;
}

}  // namespace tessera
