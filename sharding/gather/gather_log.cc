#include "sharding/gather/gather_log.h"

#include <algorithm>

#include "sharding/gather/use_times.h"

namespace tessera {

void GatherLog::note_use(int unit) {
  if (times_) times_->use(unit);
  if (unit == 0) {
    if (!has_root_) add(unit);
    has_root_ = true;
    return;
  }
  if (!recent_.empty() && recent_.back() == unit) return;
  const auto known = std::find(recent_.begin(), recent_.end(), unit);
  if (known != recent_.end()) {
    recent_.erase(known);
  } else {
    add(unit);
    if (recent_.size() == most_recent_) recent_.erase(recent_.begin());
  }
  recent_.push_back(unit);
}

void GatherLog::note_gradient(int unit) {
  if (times_) times_->use(unit);
}

void GatherLog::reset() {
  entries_.clear();
  recent_.clear();
  has_root_ = false;
}

void GatherLog::add(int entry) {
  constexpr std::size_t kMost = std::size_t{1} << 16;
  if (entries_.size() == kMost) entries_.erase(entries_.begin(), entries_.begin() + kMost / 2);
  entries_.push_back(entry);
}

}  // namespace tessera
