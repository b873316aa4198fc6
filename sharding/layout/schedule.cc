#include "sharding/layout/schedule.h"

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

std::size_t index(int unit) { return static_cast<std::size_t>(unit); }

bool ends_with(const std::vector<int>& round, const std::vector<int>& record) {
  return round.size() >= record.size() && std::equal(record.rbegin(), record.rend(), round.rbegin());
}

}  // namespace

Schedule::Schedule(int units, std::size_t ahead, int uncounted)
    : ahead_(ahead),
      uncounted_(uncounted),
      next_(index(units), kNowhere),
      last_use_(index(units), 0),
      held_(units),
      missing_(units) {
  aside_.reserve(index(units));
}

void Schedule::use(int unit) {
  if (last_ == unit) return;
  last_ = unit;
  note(unit);
  if (record_.empty()) {
    last_use_[index(unit)] = ++uses_;
    return rank(unit);
  }
  if (next_[index(unit)] == kNowhere && unit == record_[0]) rewind();
  const std::size_t position = next_[index(unit)];
  if (position == kNowhere) return;
  while (cursor_ <= position) pass();
}

void Schedule::note(int unit) {
  if (seen_.size() == kLongestRound) seen_.erase(seen_.begin(), seen_.begin() + kLongestRound / 2);
  seen_.push_back(unit);
}

void Schedule::end_round() {
  if (!seen_.empty() && seen_ != record_) {
    has_tolerated_ = !has_tolerated_ && !record_.empty() && ends_with(seen_, record_);
    if (!has_tolerated_) follow(seen_);
  } else if (!seen_.empty()) {
    has_tolerated_ = false;
  }
  rewind();
  seen_.clear();
  last_ = -1;
}

void Schedule::follow(const std::vector<int>& round) {
  record_ = round;
  following_.assign(record_.size(), kNowhere);
  std::fill(next_.begin(), next_.end(), kNowhere);
  for (std::size_t i = record_.size(); i-- > 0;) following_[i] = std::exchange(next_[index(record_[i])], i);
  cursor_ = window_end_ = window_units_ = 0;
  for (int unit = 0; unit < static_cast<int>(next_.size()); ++unit) rank(unit);
}

/// Moves the cursor behind the entry at which it is now.
void Schedule::pass() {
  const std::size_t position = cursor_++;
  const int unit = record_[position];
  next_[index(unit)] = following_[position];
  if (window_end_ <= position) {
    window_end_ = cursor_;
  } else if (following_[position] >= window_end_ && unit != uncounted_) {
    --window_units_;
  }
  rank(unit);
}

/// Moves the cursor back to the beginning, before all entries.
void Schedule::rewind() {
  const std::size_t over = cursor_;
  cursor_ = window_end_ = window_units_ = 0;
  for (std::size_t i = over; i-- > 0;) next_[index(record_[i])] = i;
  for (std::size_t i = 0; i < over; ++i) rank(record_[i]);
}

std::size_t Schedule::distance(int unit) const {
  if (record_.empty()) return last_use_[index(unit)] == 0 ? kNever : uses_ - last_use_[index(unit)];
  return next_[index(unit)] == kNowhere ? kNever : next_[index(unit)] - cursor_;
}

/// Returns a number that is larger for units that are used later. Unlike a distance, it changes only with events of the
/// unit itself.
std::size_t Schedule::lateness(int unit) const {
  if (!record_.empty()) return next_[index(unit)];
  return last_use_[index(unit)] == 0 ? kNever : kNever - last_use_[index(unit)];
}

/// Updates the unit's score.
void Schedule::rank(int unit) {
  if (held_.contains(unit)) return held_.put(unit, lateness(unit));
  if (next_[index(unit)] == kNowhere) return missing_.remove(unit);
  missing_.put(unit, kNever - next_[index(unit)]);
}

void Schedule::hold(int unit) {
  missing_.remove(unit);
  held_.put(unit, lateness(unit));
}

void Schedule::give_up(int unit) {
  held_.remove(unit);
  rank(unit);
}

int Schedule::next_missing() {
  if (missing_.empty()) return -1;
  for (; window_units_ < ahead_ && window_end_ < record_.size(); ++window_end_) {
    const int unit = record_[window_end_];
    if (next_[index(unit)] == window_end_ && unit != uncounted_) ++window_units_;
  }
  return next_[index(missing_.best())] < window_end_ ? missing_.best() : -1;
}

}  // namespace tessera
