#include "engine/memory/records/gradient_records.h"

#include <algorithm>
#include <utility>

#include "runtime/border/throw.h"
#include "sharding/reduce/gradient_place.h"

namespace tessera {

GradientRecords::GradientRecords(std::unique_ptr<FileTier> files, const std::vector<std::unique_ptr<Unit>>& units)
    : files_(std::move(files)), entries_(units.size()) {
  std::int64_t records = 0;
  for (const auto& unit : units) {
    Entry& own = entry(unit->index);
    own.unit = unit.get();
    if (unit->index == 0) continue;
    const auto trains = [](const auto& group) { return group->trainable; };
    if (std::ranges::any_of(unit->groups, trains)) own.record = records++;
  }
}

void GradientRecords::announce(std::span<const std::int64_t> units) {
  order_.clear();
  for (const std::int64_t unit : units) {
    if (entry(unit).record >= 0) order_.push_back(unit);
  }
  std::ranges::reverse(order_);
  fetch_next();
}

std::span<std::byte> GradientRecords::take(std::int64_t unit, LeaseUse use) {
  Entry& own = entry(unit);
  if (own.record < 0) return {};
  if (own.leases++ > 0) return own.memory;
  own.memory =
      value_or_throw(use == LeaseUse::kOverwrite ? files_->get_to_overwrite(own.record) : files_->get(own.record));
  place_gradients(*own.unit, own.memory.data());
  if (order_.empty() || order_.back() != unit) return own.memory;
  order_.pop_back();
  fetch_next();
  return own.memory;
}

void GradientRecords::give_back(std::int64_t unit, bool changed) {
  Entry& own = entry(unit);
  if (own.record < 0) return;
  own.changed = own.changed || changed;
  if (--own.leases > 0) return;
  take_gradients_away(*own.unit);
  throw_if_error(std::exchange(own.changed, false) ? files_->put(own.record) : files_->release(own.record));
}

void GradientRecords::fetch_next() {
  if (order_.empty()) return;
  const Entry& next = entry(order_.back());
  if (next.leases == 0) files_->fetch(next.record);
}

}  // namespace tessera
