#include "engine/memory/records/device_gradients.h"

#include <algorithm>
#include <exception>

#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "sharding/reduce/gradient_place.h"

namespace tessera {

DeviceGradients::DeviceGradients(std::unique_ptr<RecordTier> tier, FileTier* files, std::int64_t held,
                                 const std::vector<std::unique_ptr<Unit>>& units, DeviceKernels& kernels,
                                 const Slots& slots)
    : tier_(std::move(tier)),
      files_(files),
      held_(static_cast<std::size_t>(held)),
      kernels_(kernels),
      slots_(slots),
      entries_(units.size()),
      emptied_(static_cast<std::size_t>(slots.count)) {
  std::int64_t records = 0;
  for (const auto& unit : units) {
    Entry& own = entry(unit->index);
    own.unit = unit.get();
    for (const auto& group : unit->groups) {
      if (group->trainable) own.bytes += group->gradient_part.numel * 4;
    }
    if (unit->index == 0 || own.bytes == 0) continue;
    own.record = records++;
    if (files_) continue;
    own.place = value_or_throw(tier_->get(own.record)).data();
    throw_if_error(tier_->put(own.record));  // a record in memory never moves, so `put` only ends its use
  }
  for (int slot = 0; slot < slots_.count; ++slot) free_.push_back(slot);
}

DeviceGradients::~DeviceGradients() {
  try {
    if (last_) last_->wait();
    for (const Entry& each : entries_) {
      if (each.came) each.came->wait();
    }
    for (const Leaving& each : leaving_) each.mark->wait();
  } catch (const std::exception& error) {
    log_error(std::string("gradients on their way from the GPU: ") + error.what());
  }
}

/// Gives the unit a slot. Work that is queued later on the current stream may use the slot, since it waits for the last
/// copy out of the slot.
void DeviceGradients::take_slot(Entry& entry) {
  if (free_.empty()) give_up_brought();
  entry.slot = free_.front();
  free_.pop_front();
  if (const auto emptied = std::exchange(emptied_[static_cast<std::size_t>(entry.slot)], nullptr)) emptied->join();
}

/// Takes a slot back from a unit that was announced and has no lease yet.
void DeviceGradients::give_up_brought() {
  const auto brought =
      std::ranges::find_if(entries_, [](const Entry& each) { return each.slot >= 0 && each.leases == 0; });
  TORCH_INTERNAL_ASSERT(brought != entries_.end(), "more units' gradients are in use than the plan has slots for");
  std::shared_ptr<Mark> came = std::exchange(brought->came, nullptr);
  came->join();
  if (std::exchange(brought->held, nullptr)) leaving_.push_back({brought->record, std::move(came), false});
  free_.push_back(std::exchange(brought->slot, -1));
}

float* DeviceGradients::sums_on_host(const Unit& unit) const {
  return reinterpret_cast<float*>(entries_[static_cast<std::size_t>(unit.index)].place);
}

std::byte* DeviceGradients::hold(const Entry& entry, bool overwrites) {
  if (!files_) return entry.place;
  const std::int64_t record = entry.record;
  // The copy from the GPU into the record may still be under way.
  const auto leaves = [&] {
    return std::ranges::any_of(leaving_, [&](const Leaving& each) { return each.record == record; });
  };
  while (used_ >= held_ || leaves()) let_go_oldest();
  ++used_;
  return value_or_throw(overwrites ? files_->get_to_overwrite(record) : files_->get(record)).data();
}

void DeviceGradients::let_go_oldest() {
  TORCH_INTERNAL_ASSERT(!leaving_.empty(), "more records of gradients are used than the plan has memory for");
  const Leaving oldest = leaving_.front();
  leaving_.pop_front();
  oldest.mark->wait();
  --used_;
  throw_if_error(oldest.changed ? files_->put(oldest.record) : files_->release(oldest.record));
}

/// Begins to copy a unit's sums to a slot.
void DeviceGradients::bring(Entry& entry) {
  std::byte* const memory = hold(entry, /*overwrites=*/false);
  if (files_) entry.held = memory;
  take_slot(entry);
  if (entry.left) entry.left->join();
  const DeviceKernels::UploadPiece piece{slots_.memory + entry.slot * slots_.bytes, memory,
                                         static_cast<std::size_t>(entry.bytes)};
  const std::unique_ptr<Mark> now = kernels_.mark();
  entry.came = kernels_.upload({&piece, 1}, now.get());
  copied_.to_gpu += entry.bytes;
}

std::span<std::byte> DeviceGradients::take(std::int64_t unit, LeaseUse use) {
  Entry& entry = this->entry(unit);
  if (entry.record < 0) return {};
  const auto memory = [&] {
    return std::span(slots_.memory + entry.slot * slots_.bytes, static_cast<std::size_t>(entry.bytes));
  };
  if (entry.leases++ > 0) return memory();
  if (entry.slot < 0) use == LeaseUse::kOverwrite ? take_slot(entry) : bring(entry);
  // Copies that are queued later run after the copy `came`. So they may write the record again, and the record need not
  // be held any longer for `came`.
  if (entry.came) entry.came->join();
  place_gradients(*entry.unit, memory().data());
  if (order_.empty() || order_.back() != unit) return memory();
  order_.pop_back();
  bring_next();
  return memory();
}

void DeviceGradients::give_back(std::int64_t unit, bool changed) {
  Entry& entry = this->entry(unit);
  if (entry.record < 0) return;
  entry.changed = entry.changed || changed;
  if (--entry.leases > 0) return;
  take_gradients_away(*entry.unit);
  const auto slot = static_cast<std::size_t>(entry.slot);
  std::shared_ptr<Mark> came = std::exchange(entry.came, nullptr);
  const bool changes = std::exchange(entry.changed, false);
  if (changes) {
    std::byte* const memory = entry.held ? entry.held : hold(entry, /*overwrites=*/true);
    last_ = kernels_.download(memory, slots_.memory + entry.slot * slots_.bytes, static_cast<std::size_t>(entry.bytes));
    emptied_[slot] = entry.left = last_;
    copied_.to_host += entry.bytes;
  }
  if (files_ && (changes || entry.held)) leaving_.push_back({entry.record, changes ? last_ : came, changes});
  entry.held = nullptr;
  free_.push_back(std::exchange(entry.slot, -1));
}

void DeviceGradients::announce(std::span<const std::int64_t> units) {
  order_.clear();
  for (const std::int64_t unit : units) {
    if (entry(unit).record >= 0) order_.push_back(unit);
  }
  std::ranges::reverse(order_);
  bring_next();
}

/// Brings the next announced unit to a slot. If no slot is free, it only reads the record ahead.
void DeviceGradients::bring_next() {
  if (order_.empty()) return;
  Entry& next = entry(order_.back());
  if (next.slot >= 0) return;
  if (!free_.empty()) return bring(next);
  tier_->fetch(next.record);
}

}  // namespace tessera
