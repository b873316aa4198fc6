#include "runtime/comm/shared/segment_table.h"

#include <utility>

namespace tessera {

void SegmentTable::add(std::uint64_t id, Parts parts) {
  const MutexLock lock(mutex_);
  by_address_[address_of_own(id, parts)] = id;
  segments_[id] = std::move(parts);
}

void SegmentTable::remove(std::uint64_t id) {
  const MutexLock lock(mutex_);
  const auto it = segments_.find(id);
  if (it == segments_.end()) return;
  by_address_.erase(address_of_own(id, it->second));
  segments_.erase(it);
}

std::byte* SegmentTable::own_part(std::uint64_t id) const {
  const MutexLock lock(mutex_);
  return part(id, segments_.at(id), rank_).data();
}

Location SegmentTable::locate(const void* data, std::size_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const MutexLock lock(mutex_);
  auto it = by_address_.upper_bound(address);
  if (it == by_address_.begin()) return {};
  const auto& [begin, id] = *--it;
  const std::size_t size = part(id, segments_.at(id), rank_).bytes(), offset = address - begin;
  if (offset >= size || bytes > size - offset) return {};
  return {id, offset};
}

std::byte* SegmentTable::view(int peer, const Location& location) const {
  const MutexLock lock(mutex_);
  const auto it = segments_.find(location.segment);
  return it == segments_.end() ? nullptr : part(it->first, it->second, peer).data() + location.offset;
}

}  // namespace tessera
