#include "sharding/layout/plan/record_layout.h"

#include <algorithm>

namespace tessera {
namespace {

constexpr std::int64_t kCacheLine = 64;

/// Returns the number of elements, in whole blocks, whose record has at most `state.record_bytes` bytes if all their
/// state is offloaded.
std::int64_t elements_of(const TieredState& state) {
  std::int64_t bytes = kStateBlock * state.master_bytes;
  for (const StateDType dtype : state.states) bytes += state_bytes(dtype, kStateBlock).total();
  // Each array of the record is filled up to a whole cache line.
  const auto lines = static_cast<std::int64_t>(1 + 2 * state.states.size()) * kCacheLine;
  if (bytes == 0) return kStateBlock;
  return std::max<std::int64_t>(1, (state.record_bytes - lines) / bytes) * kStateBlock;
}

}  // namespace

RecordLayout::RecordLayout(std::int64_t numel, const TieredState& state)
    : Chunks(numel, elements_of(state)),
      state_(state),
      first_master_(first_below(state.master_bytes > 0 ? state.masters_below : 0)),
      first_state_(first_below(state.states.size() > 0 ? state.states_below : 0)) {
  put_below(std::min(first_master_, first_state_));
}

bool RecordLayout::are_whole() const {
  return state_.master_bytes == 0 || state_.states.size() == 0 || first_master_ == first_state_;
}

RecordLayout::Record RecordLayout::record(std::int64_t chunk) const {
  const std::int64_t elements = this->chunk(chunk).numel;
  Record record;
  const auto put = [&](std::int64_t bytes) {
    const Piece piece{record.bytes, bytes};
    record.bytes += rounded_up(bytes, kCacheLine);
    return piece;
  };
  if (chunk >= first_master_) record.masters = put(elements * state_.master_bytes);
  if (chunk >= first_state_) {
    for (std::size_t i = 0; i < state_.states.size(); ++i) {
      const StateBytes bytes = state_bytes(state_.states[i], elements);
      record.states[i] = {put(bytes.data), put(bytes.scales)};
    }
  }
  record.bytes = rounded_up(record.bytes, kPage);
  return record;
}

}  // namespace tessera
