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
    if (unit->index == 0) continue;
    const auto trains = [](const auto& group) { return group->trainable; };
    if (std::ranges::any_of(unit->groups, trains)) entry(*unit).record = records++;
  }
}

void GradientRecords::expect(const Unit& unit) {
  const Entry& entry = this->entry(unit);
  if (entry.record >= 0 && entry.opened == 0) files_->fetch(entry.record);
}

void GradientRecords::open(Unit& unit, bool has_sum) {
  Entry& entry = this->entry(unit);
  if (entry.record < 0 || entry.opened++ > 0) return;
  place_gradients(unit,
                  value_or_throw(has_sum ? files_->get(entry.record) : files_->get_to_overwrite(entry.record)).data());
  if (order_.empty() || order_.back() != unit.index) return;
  order_.pop_back();
  fetch_next();
}

void GradientRecords::close(Unit& unit, bool changed) {
  Entry& entry = this->entry(unit);
  if (entry.record < 0) return;
  entry.changed = entry.changed || changed;
  if (--entry.opened > 0) return;
  take_gradients_away(unit);
  throw_if_error(std::exchange(entry.changed, false) ? files_->put(entry.record) : files_->release(entry.record));
}

void GradientRecords::begin_update(std::vector<int> units) {
  std::erase_if(units, [&](int unit) { return entries_[static_cast<std::size_t>(unit)].record < 0; });
  order_ = std::move(units);
  std::ranges::reverse(order_);
  fetch_next();
}

void GradientRecords::fetch_next() {
  if (!order_.empty()) files_->fetch(entries_[static_cast<std::size_t>(order_.back())].record);
}

}  // namespace tessera
