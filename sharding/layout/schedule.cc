#include "sharding/layout/schedule.h"

#include <algorithm>

namespace tessera {

void Schedule::use(int unit) {
  if (!seen_.empty() && seen_.back() == unit) return;
  seen_.push_back(unit);
  const auto found = std::find(record_.begin() + cursor_, record_.end(), unit);
  if (found != record_.end()) cursor_ = found - record_.begin() + 1;
}

void Schedule::end_round() {
  if (!seen_.empty() && seen_ != record_) record_ = seen_;
  seen_.clear();
  cursor_ = 0;
}

absl::InlinedVector<int, 8> Schedule::upcoming(std::size_t count) const {
  absl::InlinedVector<int, 8> units;
  for (std::size_t i = cursor_; i < record_.size() && units.size() < count; ++i) {
    if (std::find(units.begin(), units.end(), record_[i]) == units.end()) units.push_back(record_[i]);
  }
  return units;
}

std::size_t Schedule::distance(int unit) const {
  if (record_.empty()) {
    const auto last = std::find(seen_.rbegin(), seen_.rend(), unit);
    return last == seen_.rend() ? kNever : static_cast<std::size_t>(last - seen_.rbegin());
  }
  const auto found = std::find(record_.begin() + cursor_, record_.end(), unit);
  return found == record_.end() ? kNever : static_cast<std::size_t>(found - record_.begin()) - cursor_;
}

}  // namespace tessera
